#include "recovery/coordinator/core/announcements.h"

#include <algorithm>
#include <set>
#include <utility>

namespace rekindle::coordinator {

Announced Announcements::take(Member& member, bool full, std::vector<Holding> add,
                              const std::vector<HoldingKey>& remove) {
  Announced announced;
  Holdings& holdings = member.holdings;
  const std::size_t kept = full ? 0 : holdings.size();
  if (kept + add.size() > fleet_.limits.max_holdings_per_member) {
    announced.answer =
        fail(ErrorCode::kExhausted, "node '{}' announces more than {} holdings; retire versions",
             member.info.node_id, fleet_.limits.max_holdings_per_member);
    return announced;
  }
  std::size_t bytes = full ? 0 : holdings.size_bytes();
  for (const Holding& holding : add) bytes += holding.size_bytes();
  if (bytes > fleet_.limits.max_holding_bytes_per_member) {
    announced.answer =
        fail(ErrorCode::kExhausted,
             "node '{}' announces holdings of {} bytes, {} are allowed; let its pulls of parts of "
             "versions end, or retire versions",
             member.info.node_id, bytes, fleet_.limits.max_holding_bytes_per_member);
    return announced;
  }
  Holdings::Map before;
  if (full) {
    before = holdings.all();
    holdings.clear();
  }
  for (const HoldingKey& key : remove) holdings.erase(key);
  std::set<ModelVersion> ids;
  for (Holding& holding : add) {
    ids.insert(holding.id);
    accept(member, std::move(holding), before, announced);
  }
  for (const ModelVersion& id : ids) {
    const CommitNumber commit = readiness_.mark(id);
    if (commit == 0) continue;
    announced.commit = std::max(announced.commit, commit);
    announced.waiting[id] = fleet_.catalog.find(id)->root;
  }
  return announced;
}

Result<void> Announcements::make_room(const std::string& party, const ModelVersion& id) {
  const auto found = announced_.find(party);
  if (found == announced_.end()) return {};
  std::set<ModelVersion>& versions = found->second;
  if (versions.size() < fleet_.limits.max_announced_versions || versions.contains(id)) return {};
  std::erase_if(versions, [this](const ModelVersion& other) {
    const auto version = fleet_.table.next_version(other);
    return !version || version->retiring || !version->announced;
  });
  if (versions.size() < fleet_.limits.max_announced_versions) return {};
  return fail(ErrorCode::kExhausted,
              "{}: {} has announced {} versions that no publisher has claimed, such as {}; publish "
              "or retire them",
              id.to_string(), party, versions.size(), versions.begin()->to_string());
}

void Announcements::check_holders() {
  if (!may_hold_) return;
  for (auto& [node_id, member] : fleet_.members.all()) {
    const auto may_not = [&](const std::string& model) {
      return !may_hold_(member, model).has_value();
    };
    if (member.holdings.erase_models(may_not)) member.connection.clear();
  }
}

Result<void> Announcements::may_claim(const Member& member, const ModelVersion& id) const {
  return may_claim_ ? may_claim_(member, id) : Result<void>();
}

void Announcements::accept(Member& member, Holding holding, const Holdings::Map& before,
                           Announced& announced) {
  Holdings& holdings = member.holdings;
  const HoldingKey key{holding.id, holding.layout};
  const DurableVersion* known = fleet_.catalog.find(holding.id);
  const auto leave_out = [&](std::string why, bool again) {
    holdings.erase(key);
    announced.answer->push_back({holding.id, std::move(why), again});
  };
  // A copy that counts may let another node drop its own. Asked before anything else, so that no
  // answer tells what the fleet has of this model.
  if (auto may = may_hold_ ? may_hold_(member, holding.id.model) : Result<void>(); !may) {
    return leave_out(may.error().message(), true);
  }
  if (known != nullptr && known->root != holding.root) {
    return leave_out(
        fmt::format("{} was published before with other contents (root {}, this one {})",
                    holding.id.to_string(), known->root.hex(), holding.root.hex()),
        false);
  }
  const bool is_new = known == nullptr && holding.counts();
  std::vector<VersionSignature> signatures = std::exchange(holding.signatures, {});
  if (is_new || known != nullptr) {
    signatures = fleet_.signers.admit(holding.id, holding.root, signatures);
  }
  if (is_new) {
    auto trusted = fleet_.signers.check(holding.id, holding.root, signatures);
    // Its bytes are not wrong, so the node keeps the copy. A publisher may sign it later.
    if (!trusted) return leave_out(trusted.error().message(), true);
  }
  if (known != nullptr) fleet_.signers.keep(holding.id, holding.root, signatures);
  // A verified copy claims its version where the table does not know it: state was lost, or it was
  // published while no coordinator ran. So does one that knows the parts of a version, of which the
  // table has none. A version below the watermark counts as retired instead, and its holder is told
  // so.
  const bool tells_parts =
      !holding.part_layouts.empty() && known != nullptr && known->parts.empty();
  if ((known != nullptr && !tells_parts) || !holding.counts() ||
      fleet_.catalog.is_retired(holding.id)) {
    holdings.put(std::move(holding));
    return;
  }
  // The signature of a trusted publisher is as good as the member's own right.
  const bool vouched = is_new && fleet_.signers.demands(holding.id.model);
  if (auto may = vouched ? Result<void>() : may_claim(member, holding.id); !may) {
    if (known == nullptr) return leave_out(may.error().message(), true);
    holdings.put(std::move(holding));
    return;
  }
  const std::string party = member.info.responsible();
  const bool merely_announced = is_new && !vouched;
  if (auto room = merely_announced ? make_room(party, holding.id) : Result<void>(); !room) {
    return leave_out(room.error().message(), true);
  }
  const Durably<void> claimed =
      fleet_.catalog.claim({holding.id, holding.root, holding.tensor_set, holding.checkpoint_bytes,
                            /*published=*/false, vouched, /*ready=*/holding.whole, /*replicas=*/{},
                            holding.part_layouts});
  if (!claimed.answer && claimed.commit == 0) {
    return leave_out(claimed.answer.error().message(), true);
  }
  if (merely_announced) announced_[party].insert(holding.id);
  fleet_.signers.keep(holding.id, holding.root, std::move(signatures));
  // Until the claim is durable the node keeps its earlier holding of the same root.
  if (const auto had = before.find(key);
      had != before.end() && had->second.root == holding.root && !holdings.all().contains(key)) {
    holdings.put(had->second);
  }
  const auto kept = holdings.all().find(key);
  if (kept != holdings.all().end() && kept->second.root != holding.root) holdings.erase(key);
  announced.commit = std::max(announced.commit, claimed.commit);
  announced.waiting[holding.id] = holding.root;
  holdings.put_pending(std::move(holding));
}

std::vector<AnnounceConflict> Announcements::finish(Announced announced,
                                                    const Result<void>& commit) const {
  std::vector<AnnounceConflict> conflicts = std::move(*announced.answer);
  for (const auto& [id, root] : announced.waiting) {
    const DurableVersion* version = fleet_.catalog.find(id);
    if (!commit) {
      conflicts.push_back({id, commit.error().message(), true});
    } else if (version != nullptr && version->root != root) {
      conflicts.push_back({id, fmt::format("{} was published before with other contents (root {})",
                                           id.to_string(), version->root.hex())});
    }
  }
  return conflicts;
}

void Announcements::batch_ended(bool durable) {
  const auto root_of = [this](const ModelVersion& id) -> const Digest* {
    const DurableVersion* version = fleet_.catalog.find(id);
    return version == nullptr ? nullptr : &version->root;
  };
  for (auto& [node_id, member] : fleet_.members.all()) {
    if (durable) {
      member.holdings.settle_pending(root_of);
    } else {
      member.holdings.clear_pending();
    }
  }
}

}  // namespace rekindle::coordinator
