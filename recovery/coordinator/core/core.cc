#include "recovery/coordinator/core/core.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

// A gap between two looks at the clock that is longer than this was a pause of our own.
constexpr Duration kMaxStep = std::chrono::milliseconds(500);
constexpr std::size_t kMaxNodeIdBytes = 255;
constexpr std::uint64_t kMaxEpoch = std::uint64_t{1} << 62;

}  // namespace

Core::Core(const Timing& timing, const Limits& limits, DurableState durable, Persist persist,
           std::function<PullId()> new_pull_id)
    : timing_(timing),
      limits_(limits),
      new_pull_id_(std::move(new_pull_id)),
      catalog_(std::move(durable), std::move(persist)),
      members_(timing, limits.max_members) {}

Result<void> Core::start(TimePoint now) {
  TRY_VOID(catalog_.raise_epoch(catalog_.epoch() + 1));
  started_ = now;
  last_tick_ = now;
  grace_until_ = now + timing_.dead_after;
  return {};
}

std::uint64_t Core::clock_ms(TimePoint now) {
  return static_cast<std::uint64_t>(milliseconds(now.time_since_epoch()));
}

void Core::tick(TimePoint now) {
  if (now < last_tick_) return;
  if (const Duration gap = now - last_tick_; gap > kMaxStep) {
    const Duration slept = gap - kMaxStep;
    members_.shift(slept);
    for (auto& [id, pull] : pulls_) pull.last_progress += slept;
    if (gap > timing_.dead_after) grace_until_ = std::max(grace_until_, now + timing_.dead_after);
  }
  last_tick_ = now;
  members_.advance(now, grace_until_);
  expire_pulls(now);
}

Result<Registered> Core::enroll(const NodeInfo& info, const std::string& failure_domain,
                                std::uint64_t highest_epoch, const std::string& connection,
                                TimePoint now) {
  tick(now);
  if (info.node_id.empty() || info.node_id.size() > kMaxNodeIdBytes) {
    return fail(ErrorCode::kInvalid, "a node id has 1 to {} bytes, this one {}", kMaxNodeIdBytes,
                info.node_id.size());
  }
  if (info.incarnation.is_nil() || info.control_endpoint.empty()) {
    return fail(ErrorCode::kInvalid, "node '{}' registers without incarnation or address",
                info.node_id);
  }
  if (highest_epoch >= kMaxEpoch) {
    return fail(ErrorCode::kInvalid, "node '{}' reports the absurd epoch {}", info.node_id,
                highest_epoch);
  }
  // An earlier or other coordinator got further than our state knows: reign above it.
  if (highest_epoch > epoch()) TRY_VOID(catalog_.raise_epoch(highest_epoch + 1));
  TRY(const bool is_new, members_.enroll(info, failure_domain, connection, now));
  (void)is_new;
  return Registered{epoch()};
}

void Core::disconnected(const std::string& node_id, const Incarnation& incarnation,
                        const std::string& connection, TimePoint now) {
  tick(now);
  members_.disconnect(node_id, incarnation, connection);
}

Result<Member*> Core::hear(const std::string& node_id, const Incarnation& incarnation,
                           std::uint64_t epoch_seen, TimePoint now) {
  tick(now);
  if (epoch_seen > epoch()) {
    return fail(ErrorCode::kStale,
                "node '{}' has seen epoch {}, this coordinator reigns in {}; register again",
                node_id, epoch_seen, epoch());
  }
  return members_.hear(node_id, incarnation, now);
}

Result<HeartbeatAnswer> Core::heartbeat(const std::string& node_id, const Incarnation& incarnation,
                                        std::uint64_t epoch_seen, std::uint64_t progress,
                                        TimePoint now) {
  TRY(Member * member, hear(node_id, incarnation, epoch_seen, now));
  member->progress = progress;
  HeartbeatAnswer answer{epoch(), clock_ms(now), {}};
  for (const auto& [key, holding] : member->holdings) {
    const DurableVersion* version = catalog_.find(key.id);
    if (version == nullptr || !version->retiring) continue;
    if (answer.retire.empty() || answer.retire.back() != key.id) answer.retire.push_back(key.id);
  }
  return answer;
}

Result<void> Core::accept_holding(Member& member, Holding holding,
                                  std::vector<AnnounceConflict>& conflicts) {
  const HoldingKey key{holding.id, holding.layout};
  // A verified copy vouches for its version where the table does not know it (lost state, published
  // while no coordinator was there); a partial one does not.
  Result<void> claimed;
  if (holding.complete) {
    claimed = catalog_.claim(holding.id, holding.root, holding.tensor_set, holding.checkpoint_bytes,
                             /*revive=*/false);
  } else if (const auto* version = catalog_.find(holding.id);
             version != nullptr && version->root != holding.root) {
    claimed = fail(ErrorCode::kDenied, "{} has another root", holding.id.to_string());
  }
  if (claimed) {
    member.holdings[key] = std::move(holding);
    return {};
  }
  member.holdings.erase(key);
  if (claimed.error().code() != ErrorCode::kDenied) return claimed;  // not durable: announce again
  conflicts.push_back({holding.id, claimed.error().message()});
  return {};
}

Result<std::vector<AnnounceConflict>> Core::announce(
    const std::string& node_id, const Incarnation& incarnation, std::uint64_t epoch_seen, bool full,
    std::vector<Holding> add, const std::vector<HoldingKey>& remove, TimePoint now) {
  TRY(Member * member, hear(node_id, incarnation, epoch_seen, now));
  const std::size_t before = full ? 0 : member->holdings.size();
  if (before + add.size() > limits_.max_holdings_per_member) {
    return fail(ErrorCode::kExhausted, "node '{}' announces more than {} holdings; retire versions",
                node_id, limits_.max_holdings_per_member);
  }
  if (full) member->holdings.clear();
  for (const HoldingKey& key : remove) member->holdings.erase(key);
  std::vector<AnnounceConflict> conflicts;
  for (Holding& holding : add) {
    TRY_VOID(accept_holding(*member, std::move(holding), conflicts));
  }
  return conflicts;
}

Result<std::uint64_t> Core::publish(const std::string& node_id, const Incarnation& incarnation,
                                    const ModelVersion& id, const Digest128& root,
                                    const Digest128& tensor_set, std::uint64_t checkpoint_bytes,
                                    TimePoint now) {
  if (!node_id.empty()) TRY_VOID(hear(node_id, incarnation, 0, now));
  if (root.is_nil()) return fail(ErrorCode::kInvalid, "publish {}: no root", id.to_string());
  TRY_VOID(catalog_.claim(id, root, tensor_set, checkpoint_bytes, /*revive=*/true));
  return epoch();
}

Result<std::uint32_t> Core::retire(const ModelVersion& id, TimePoint now) {
  tick(now);
  TRY_VOID(catalog_.retire(id));
  std::uint32_t nodes = 0;
  for (const auto& [node_id, member] : members_.all()) {
    const auto first = member.holdings.lower_bound({id, {}});
    if (first != member.holdings.end() && first->first.id == id) ++nodes;
  }
  return nodes;
}

}  // namespace rekindle::coordinator
