#include "recovery/coordinator/core/part_holders.h"

#include <algorithm>

namespace rekindle::coordinator {

std::set<Digest> parts_of(const Member& member, const ModelVersion& id,
                          const DurableVersion& version) {
  std::set<Digest> parts;
  for (const auto& [key, holding] : member.holdings.of(id)) {
    if (!holding.counts() || holding.root != version.root) continue;
    if (std::ranges::binary_search(version.parts, key.layout)) parts.insert(key.layout);
  }
  return parts;
}

std::set<Digest> parts_held(const Membership& members, const ModelVersion& id,
                            const DurableVersion& version, const MemberFilter& accepts) {
  std::set<Digest> held;
  if (version.parts.empty()) return held;
  for (const auto& [node_id, member] : members.all()) {
    if (accepts(member)) held.merge(parts_of(member, id, version));
  }
  return held;
}

bool all_parts_held(const Membership& members, const ModelVersion& id,
                    const DurableVersion& version, const MemberFilter& accepts) {
  return !version.parts.empty() &&
         parts_held(members, id, version, accepts).size() == version.parts.size();
}

}  // namespace rekindle::coordinator
