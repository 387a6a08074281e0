#include "recovery/coordinator/core/core.h"

#include <algorithm>
#include <set>
#include <utility>

#include "recovery/coordinator/core/seeded_bugs.h"

namespace rekindle::coordinator {

namespace {

// A gap between two looks at the clock that is longer than this was a pause of our own.
constexpr Duration kMaxStep = std::chrono::milliseconds(500);
constexpr Duration kMarkEvery = std::chrono::seconds(1);
constexpr std::size_t kMaxNodeIdBytes = 255;
constexpr std::uint64_t kMaxEpoch = std::uint64_t{1} << 62;
// An agent's word raises the epoch by less than this: one that lies must not use the epochs up. No
// agent hears of more than that above the epoch in which it was registered.
constexpr std::uint64_t kMaxEpochStep = std::uint64_t{1} << 32;

}  // namespace

Core::Core(const Timing& timing, const Limits& limits, DurableState durable,
           std::function<PullId()> new_pull_id)
    : timing_(timing),
      limits_(limits),
      new_pull_id_(std::move(new_pull_id)),
      catalog_(std::move(durable)),
      members_(timing, limits.max_members),
      replicas_(timing, limits),
      instances_(timing, limits) {}

CommitNumber Core::start(TimePoint now) {
  started_ = now;
  retired_before_ = now + timing_.retire_deadline;
  last_tick_ = now;
  grace_until_ = now + timing_.dead_after;
  return catalog_.raise_epoch(catalog_.epoch() + 1);
}

CommitNumber Core::committed(CommitNumber number, bool durable, TimePoint now) {
  tick(now);
  const DurableTable::Ended ended = catalog_.committed(number, durable);
  for (auto& [node_id, member] : members_.all()) {
    if (!durable) {
      member.unclaimed.clear();
    } else if (!member.unclaimed.empty()) {
      settle_unclaimed(member);
    }
  }
  for (const ModelVersion& id : ended.versions) mark_ready(id, nullptr);
  return ended.through;
}

std::uint64_t Core::clock_ms(TimePoint now) {
  return static_cast<std::uint64_t>(milliseconds(now.time_since_epoch()));
}

void Core::tick(TimePoint now) {
  if (now < last_tick_) return;
  if (const Duration gap = now - last_tick_; gap > kMaxStep) {
    const Duration slept = gap - kMaxStep;
    members_.shift(slept);
    replicas_.shift(slept);
    instances_.shift(slept);
    rounds_.shift(slept);
    for (Waiting& waiting : waiting_) waiting.expires += slept;
    for (auto& [id, pull] : pulls_) pull.last_progress += slept;
    for (auto& [id, deadline] : retire_deadlines_) deadline += slept;
    retired_before_ += slept;
    if (gap > timing_.dead_after) grace_until_ = std::max(grace_until_, now + timing_.dead_after);
  }
  last_tick_ = now;
  members_.advance(now, grace_until_);
  expire_pulls(now);
  instances_.advance(members_, now);
  rounds_.advance(members_, now);
  // Who has not reported yet may hold what seems to be lost.
  if (in_grace(now)) return;
  mark_all_ready(now);
  replicas_.advance(
      catalog_, members_, [this](const Incarnation& node) { return pullers_of(node); }, now);
}

Durably<Registered> Core::enroll(const NodeInfo& info, const std::string& failure_domain,
                                 std::uint64_t highest_epoch, const std::string& connection,
                                 TimePoint now) {
  tick(now);
  if (info.node_id.empty() || info.node_id.size() > kMaxNodeIdBytes) {
    return {fail(ErrorCode::kInvalid, "a node id has 1 to {} bytes, this one {}", kMaxNodeIdBytes,
                 info.node_id.size())};
  }
  if (info.incarnation.is_nil() || info.control_endpoint.empty()) {
    return {fail(ErrorCode::kInvalid, "node '{}' registers without incarnation or address",
                 info.node_id)};
  }
  const bool too_far = highest_epoch > epoch() && highest_epoch - epoch() >= kMaxEpochStep;
  if (too_far || highest_epoch >= kMaxEpoch - 1) {
    return {fail(ErrorCode::kInvalid,
                 "node '{}' reports the absurd epoch {} (this coordinator leads in epoch {}): stop "
                 "its agent, delete the file agent/epoch in its --store directory and start it "
                 "again",
                 info.node_id, highest_epoch, epoch())};
  }
  // An earlier or other coordinator got further than our state knows: this term must be above it.
  if (highest_epoch > epoch() && !seeded(SeededBug::kEpochNotRaised)) {
    const std::uint64_t wanted = std::max(highest_epoch + 1, catalog_.next_epoch());
    return {fail(ErrorCode::kUnavailable,
                 "node '{}' has seen epoch {}, this coordinator is raising its own; register again",
                 info.node_id, highest_epoch),
            catalog_.raise_epoch(wanted)};
  }
  auto is_new = members_.enroll(info, failure_domain, connection, now);
  if (!is_new) return {fail(std::move(is_new).error())};
  return {Registered{epoch()}};
}

void Core::disconnected(const std::string& node_id, const Incarnation& incarnation,
                        const std::string& connection, TimePoint now) {
  tick(now);
  members_.disconnect(node_id, incarnation, connection);
}

Result<Member*> Core::hear(const std::string& node_id, const Incarnation& incarnation,
                           std::uint64_t epoch_seen, TimePoint now) {
  tick(now);
  if (epoch_seen > epoch() && !seeded(SeededBug::kEpochNotRaised)) {
    return fail(ErrorCode::kStale,
                "node '{}' has seen epoch {}, this coordinator leads in epoch {}; register again",
                node_id, epoch_seen, epoch());
  }
  return members_.hear(node_id, incarnation, now);
}

// `before`: what it held until this announcement replaced it all.
void Core::accept_holding(Member& member, Holding holding,
                          const std::map<HoldingKey, Holding>& before, Announced& announced) {
  const HoldingKey key{holding.id, holding.layout};
  const DurableVersion* known = catalog_.find(holding.id);
  const auto leave_out = [&](std::string why, bool again) {
    member.holdings.erase(key);
    announced.answer->push_back({holding.id, std::move(why), again});
  };
  if (known != nullptr && known->root != holding.root) {
    return leave_out(
        fmt::format("{} was published before with other contents (root {}, this one {})",
                    holding.id.to_string(), known->root.hex(), holding.root.hex()),
        false);
  }
  // A verified copy vouches for its version where the table does not know it (lost state, published
  // while no coordinator was there); another one does not. What is too old for the table is
  // retired: its holder is told so.
  if (known != nullptr || !holding.counts() || catalog_.is_retired(holding.id)) {
    member.holdings[key] = std::move(holding);
    return;
  }
  const Durably<void> claimed =
      catalog_.claim({holding.id, holding.root, holding.tensor_set, holding.checkpoint_bytes,
                      /*revive=*/false, /*ready=*/holding.whole});
  if (!claimed.answer && claimed.commit == 0) {
    return leave_out(claimed.answer.error().message(), true);
  }
  // Until the claim is durable it holds what it held of the same root before.
  if (const auto had = before.find(key); had != before.end() && had->second.root == holding.root) {
    member.holdings.insert(*had);
  }
  const auto kept = member.holdings.find(key);
  if (kept != member.holdings.end() && kept->second.root != holding.root) {
    member.holdings.erase(kept);
  }
  announced.commit = std::max(announced.commit, claimed.commit);
  announced.waiting[holding.id] = holding.root;
  member.unclaimed[key] = std::move(holding);
}

// Its claim is durable, or another one's for the same version.
void Core::settle_unclaimed(Member& member) {
  for (auto it = member.unclaimed.begin(); it != member.unclaimed.end();) {
    const DurableVersion* version = catalog_.find(it->first.id);
    if (version == nullptr) {
      ++it;
      continue;
    }
    if (version->root == it->second.root) {
      member.holdings[it->first] = std::move(it->second);
    } else {
      member.holdings.erase(it->first);
    }
    it = member.unclaimed.erase(it);
  }
}

void Core::mark_ready(const ModelVersion& id, Announced* announced) {
  const DurableVersion* version = catalog_.find(id);
  if (version == nullptr || version->retiring || version->ready) return;
  if (!catalog_.is_covered(id, members_)) return;
  const CommitNumber commit = catalog_.mark_ready(id);
  if (announced == nullptr || commit == 0) return;
  announced->commit = std::max(announced->commit, commit);
  announced->waiting[id] = version->root;
}

void Core::mark_all_ready(TimePoint now) {
  if (now < next_marks_) return;
  next_marks_ = now + kMarkEvery;
  for (const ModelVersion& id : catalog_.live()) mark_ready(id, nullptr);
}

Announced Core::announce(const std::string& node_id, const Incarnation& incarnation,
                         std::uint64_t epoch_seen, bool full, std::vector<Holding> add,
                         const std::vector<HoldingKey>& remove, TimePoint now) {
  Announced announced;
  auto heard = hear(node_id, incarnation, epoch_seen, now);
  if (!heard) {
    announced.answer = fail(std::move(heard).error());
    return announced;
  }
  Member* const member = *heard;
  const std::size_t kept = full ? 0 : member->holdings.size() + member->unclaimed.size();
  if (kept + add.size() > limits_.max_holdings_per_member) {
    announced.answer =
        fail(ErrorCode::kExhausted, "node '{}' announces more than {} holdings; retire versions",
             node_id, limits_.max_holdings_per_member);
    return announced;
  }
  std::map<HoldingKey, Holding> before;
  if (full) {
    before.swap(member->holdings);
    member->unclaimed.clear();
  }
  for (const HoldingKey& key : remove) {
    member->holdings.erase(key);
    member->unclaimed.erase(key);
  }
  std::set<ModelVersion> ids;
  for (Holding& holding : add) {
    ids.insert(holding.id);
    accept_holding(*member, std::move(holding), before, announced);
  }
  for (const ModelVersion& id : ids) mark_ready(id, &announced);
  std::erase_if(member->leaving, [&](const auto& entry) {
    return entry.second <= now || !member->holds_any(entry.first);
  });
  return announced;
}

std::vector<AnnounceConflict> Core::finish(Announced announced, const Result<void>& commit) const {
  std::vector<AnnounceConflict> conflicts = std::move(*announced.answer);
  for (const auto& [id, root] : announced.waiting) {
    const DurableVersion* version = catalog_.find(id);
    if (!commit) {
      conflicts.push_back({id, commit.error().message(), true});
    } else if (version != nullptr && version->root != root) {
      conflicts.push_back({id, fmt::format("{} was published before with other contents (root {})",
                                           id.to_string(), version->root.hex())});
    }
  }
  return conflicts;
}

Durably<std::uint64_t> Core::publish(const std::string& node_id, const Incarnation& incarnation,
                                     const ModelVersion& id, const Digest& root,
                                     const Digest& tensor_set, std::uint64_t checkpoint_bytes,
                                     TimePoint now, std::optional<std::uint32_t> replicas) {
  if (!node_id.empty()) {
    if (auto heard = hear(node_id, incarnation, 0, now); !heard) {
      return {fail(std::move(heard).error())};
    }
  }
  if (root.is_nil()) return {fail(ErrorCode::kInvalid, "publish {}: no root", id.to_string())};
  Durably<void> claimed = catalog_.claim({id, root, tensor_set, checkpoint_bytes, /*revive=*/true,
                                          /*ready=*/false, replicas});
  if (!claimed.answer) return {fail(std::move(claimed.answer).error()), claimed.commit};
  return {epoch(), claimed.commit};
}

}  // namespace rekindle::coordinator
