#include "recovery/coordinator/core/core.h"

#include <algorithm>
#include <utility>

#include "recovery/coordinator/core/seeded_bugs.h"

namespace rekindle::coordinator {

namespace {

// A gap between two looks at the clock that is longer than this was a pause of our own.
constexpr Duration kMaxStep = std::chrono::milliseconds(500);
constexpr std::size_t kMaxNodeIdBytes = 255;
constexpr std::uint64_t kMaxEpoch = std::uint64_t{1} << 62;
// An agent's word may raise the epoch so far at once: one that lies must not use the epochs up.
constexpr std::uint64_t kMaxEpochStep = std::uint64_t{1} << 32;

}  // namespace

Core::Core(const Timing& timing, const Limits& limits, DurableState durable, Persist persist,
           std::function<PullId()> new_pull_id)
    : timing_(timing),
      limits_(limits),
      new_pull_id_(std::move(new_pull_id)),
      catalog_(std::move(durable), std::move(persist)),
      members_(timing, limits.max_members),
      replicas_(timing, limits),
      instances_(timing, limits) {}

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
    replicas_.shift(slept);
    instances_.shift(slept);
    rounds_.shift(slept);
    for (Waiting& waiting : waiting_) waiting.expires += slept;
    for (auto& [id, pull] : pulls_) pull.last_progress += slept;
    if (gap > timing_.dead_after) grace_until_ = std::max(grace_until_, now + timing_.dead_after);
  }
  last_tick_ = now;
  members_.advance(now, grace_until_);
  expire_pulls(now);
  instances_.advance(members_, now);
  rounds_.advance(members_, now);
  // Who has not reported yet may hold what seems to be lost.
  if (in_grace(now)) return;
  replicas_.advance(
      catalog_, members_, [this](const Incarnation& node) { return pullers_of(node); }, now);
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
  const bool too_far = highest_epoch > epoch() && highest_epoch - epoch() > kMaxEpochStep;
  if (too_far || highest_epoch >= kMaxEpoch - 1) {
    return fail(ErrorCode::kInvalid,
                "node '{}' reports the absurd epoch {} (this coordinator reigns in {}); restart it",
                info.node_id, highest_epoch, epoch());
  }
  // An earlier or other coordinator got further than our state knows: reign above it.
  if (highest_epoch > epoch() && !seeded(SeededBug::kEpochNotRaised)) {
    TRY_VOID(catalog_.raise_epoch(highest_epoch + 1));
  }
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
  if (epoch_seen > epoch() && !seeded(SeededBug::kEpochNotRaised)) {
    return fail(ErrorCode::kStale,
                "node '{}' has seen epoch {}, this coordinator reigns in {}; register again",
                node_id, epoch_seen, epoch());
  }
  return members_.hear(node_id, incarnation, now);
}

// `before`: what it held until this announcement replaced it all.
void Core::accept_holding(Member& member, Holding holding,
                          const std::map<HoldingKey, Holding>& before,
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
    return;
  }
  // Not durable now: what it held of the same root before, it still does.
  const bool again = claimed.error().code() != ErrorCode::kDenied;
  if (const auto had = before.find(key); again && had != before.end()) member.holdings.insert(*had);
  const auto kept = member.holdings.find(key);
  const bool keep = again && kept != member.holdings.end() && kept->second.root == holding.root;
  if (kept != member.holdings.end() && !keep) member.holdings.erase(kept);
  conflicts.push_back({holding.id, claimed.error().message(), again});
}

Result<std::vector<AnnounceConflict>> Core::announce(
    const std::string& node_id, const Incarnation& incarnation, std::uint64_t epoch_seen, bool full,
    std::vector<Holding> add, const std::vector<HoldingKey>& remove, TimePoint now) {
  TRY(Member * member, hear(node_id, incarnation, epoch_seen, now));
  const std::size_t kept = full ? 0 : member->holdings.size();
  if (kept + add.size() > limits_.max_holdings_per_member) {
    return fail(ErrorCode::kExhausted, "node '{}' announces more than {} holdings; retire versions",
                node_id, limits_.max_holdings_per_member);
  }
  std::map<HoldingKey, Holding> before;
  if (full) before.swap(member->holdings);
  for (const HoldingKey& key : remove) member->holdings.erase(key);
  std::vector<AnnounceConflict> conflicts;
  for (Holding& holding : add) {
    accept_holding(*member, std::move(holding), before, conflicts);
  }
  std::erase_if(member->leaving, [&](const auto& entry) {
    return entry.second <= now || !member->holds_any(entry.first);
  });
  return conflicts;
}

Result<std::uint64_t> Core::publish(const std::string& node_id, const Incarnation& incarnation,
                                    const ModelVersion& id, const Digest128& root,
                                    const Digest128& tensor_set, std::uint64_t checkpoint_bytes,
                                    TimePoint now, std::optional<std::uint32_t> replicas) {
  if (!node_id.empty()) TRY_VOID(hear(node_id, incarnation, 0, now));
  if (root.is_nil()) return fail(ErrorCode::kInvalid, "publish {}: no root", id.to_string());
  TRY_VOID(catalog_.claim(id, root, tensor_set, checkpoint_bytes, /*revive=*/true, replicas));
  return epoch();
}

}  // namespace rekindle::coordinator
