#include "recovery/coordinator/core/eviction_permits.h"

namespace rekindle::coordinator {

bool EvictionPermits::has_permit(const Member& member, const ModelVersion& id,
                                 TimePoint now) const {
  const auto found = valid_until_.find({member.info.incarnation, id});
  return found != valid_until_.end() && found->second > now;
}

std::string EvictionPermits::why_not_reliable(const Member& holder, const ModelVersion& id,
                                              TimePoint now) const {
  if (fleet_.drained(holder.info.node_id)) return "drained";
  if (holder.standing.quarantined(now)) return "quarantined";
  if (has_permit(holder, id, now)) return "letting go of it, too";
  return holder.alive(now) ? "" : "not heard of";
}

Result<void> EvictionPermits::grant(const Member& member, const ModelVersion& id, TimePoint now) {
  const std::string& node_id = member.info.node_id;
  const DurableVersion* version = fleet_.catalog.find(id);
  if (fleet_.catalog.is_retired(id)) return {};
  if (version == nullptr || !member.holdings.holds(id)) {
    return fail(ErrorCode::kDenied,
                "{} must stay on {}: it is not announced to the coordinator; try again later",
                id.to_string(), node_id);
  }
  std::string others;
  for (const auto& [other_id, other] : fleet_.members.all()) {
    if (other_id == node_id || !other.holdings.holds_whole(id, version->root)) continue;
    const std::string why = why_not_reliable(other, id, now);
    if (why.empty()) {
      valid_until_[{member.info.incarnation, id}] = now + fleet_.timing.eviction_permit;
      return {};
    }
    others += fmt::format("{}{} ({})", others.empty() ? "" : ", ", other_id, why);
  }
  if (others.empty()) others = "none";
  return fail(ErrorCode::kDenied,
              "{} must stay on {}: it is the last copy to rely on; other holders: {}",
              id.to_string(), node_id, others);
}

void EvictionPermits::registered(const Incarnation& node) {
  std::erase_if(valid_until_, [&](const auto& entry) { return entry.first.first == node; });
}

void EvictionPermits::announced(const Member& member, TimePoint now) {
  std::erase_if(valid_until_, [&](const auto& entry) {
    const auto& [node, id] = entry.first;
    return entry.second <= now || (node == member.info.incarnation && !member.holdings.holds(id));
  });
}

void EvictionPermits::shift(Duration by) {
  for (auto& [key, until] : valid_until_) until += by;
}

}  // namespace rekindle::coordinator
