#include "recovery/coordinator/core/membership.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

HoldingKey key_of(const Holding& holding) { return {holding.id, holding.layout}; }

constexpr std::uint32_t kMaxFlappingDoublings = 16;

}  // namespace

std::ranges::subrange<Holdings::Map::const_iterator> Holdings::of(const ModelVersion& id) const {
  const auto begin = all_.lower_bound({id, {}});
  auto end = begin;
  while (end != all_.end() && end->first.id == id) ++end;
  return {begin, end};
}

bool Holdings::holds_whole(const ModelVersion& id, const Digest& root) const {
  return std::ranges::any_of(of(id), [&](const auto& entry) {
    const Holding& holding = entry.second;
    return holding.whole && holding.counts() && holding.root == root;
  });
}

bool Holdings::holds_a_complete_layout(const ModelVersion& id) const {
  return std::ranges::any_of(of(id), [](const auto& entry) { return entry.second.counts(); });
}

std::size_t Holdings::size_bytes() const {
  std::size_t bytes = 0;
  for (const Map* map : {&all_, &pending_}) {
    for (const auto& [key, holding] : *map) bytes += holding.size_bytes();
  }
  return bytes;
}

void Holdings::put(Holding holding) { all_[key_of(holding)] = std::move(holding); }

void Holdings::put_pending(Holding holding) { pending_[key_of(holding)] = std::move(holding); }

void Holdings::erase(const HoldingKey& key) {
  all_.erase(key);
  pending_.erase(key);
}

bool Holdings::erase_models(const std::function<bool(const std::string& model)>& gone) {
  const auto is_gone = [&](const auto& entry) { return gone(entry.first.id.model); };
  const std::size_t erased = std::erase_if(all_, is_gone) + std::erase_if(pending_, is_gone);
  return erased > 0;
}

void Holdings::clear() {
  all_.clear();
  pending_.clear();
}

void Flapping::died(const Timing& timing, TimePoint now) {
  const Duration since_last = now - last_death_;
  if (deaths_ > 0 && since_last <= timing.flap_window) {
    const Duration backoff =
        timing.quarantine_first * (1L << std::min(strikes_, kMaxFlappingDoublings));
    owed_ = std::min(backoff, timing.quarantine_max);
    ++strikes_;
  } else if (deaths_ > 0 && since_last > timing.quarantine_max) {
    strikes_ = 0;
  }
  ++deaths_;
  last_death_ = now;
}

void Flapping::returned(TimePoint now) {
  left_out_until_ = std::max(left_out_until_, now + owed_);
  owed_ = Duration::zero();
}

std::string Member::domain() const {
  if (!failure_domain.empty()) return "domain " + failure_domain;
  if (!info.host_id.empty()) return "host " + info.host_id;
  return "node " + info.node_id;
}

Result<void> Membership::check_owner(const Member& holder, const NodeInfo& info) {
  if (holder.is_dead()) return {};
  // A process with the certificate that a fleet shares may have come while the owner was away.
  if (info.owns_node_id && !holder.info.owns_node_id) return {};
  const bool same_party = holder.info.party == info.party;
  if (!holder.connection.empty()) {
    if (same_party && holder.info.incarnation == info.incarnation) return {};
    const bool same_certificate =
        same_party && !info.party.empty() && !info.party.starts_with(NodeInfo::kHostParty);
    return fail(ErrorCode::kDenied, "node id '{}' is in use by a live process at {}; {}",
                info.node_id, holder.info.control_endpoint,
                same_certificate ? "both have the certificate of " + info.party +
                                       ": give each host a certificate of its own"
                                 : "choose another --node-id");
  }
  if (same_party || holder.state == NodeState::kSuspect) return {};
  return fail(ErrorCode::kUnavailable,
              "node id '{}' was in use a moment ago by another host, at {}; try again, or choose "
              "another --node-id",
              info.node_id, holder.info.control_endpoint);
}

Result<bool> Membership::enroll(const NodeInfo& info, const std::string& failure_domain,
                                const std::string& connection, TimePoint now) {
  auto found = members_.find(info.node_id);
  if (found != members_.end()) TRY_VOID(check_owner(found->second, info));
  Flapping past;
  if (found != members_.end() && found->second.info.incarnation != info.incarnation) {
    const Member& holder = found->second;
    past = holder.flapping;
    if (!holder.is_dead()) past.died(timing_, now);
    members_.erase(found);
    found = members_.end();
  }
  if (found == members_.end() && members_.size() >= max_members_) {
    return fail(ErrorCode::kExhausted, "the coordinator has its {} members already", max_members_);
  }
  const bool is_new = found == members_.end() || found->second.is_dead();
  const bool is_other = found == members_.end();
  Member& member = members_[info.node_id];
  if (is_other) member.flapping = past;
  if (is_new) member.flapping.returned(now);
  member.info = info;
  member.failure_domain = failure_domain;
  member.connection = connection;
  member.state = NodeState::kAlive;
  member.last_heard = now;
  next_due_ = std::min(next_due_, now + timing_.suspect_after);
  return is_new;
}

Result<Member*> Membership::hear(const std::string& node_id, const Incarnation& incarnation,
                                 TimePoint now) {
  Member* member = find(node_id, incarnation);
  // Once its connection has closed the id is free for others, so the node must register again.
  if (member == nullptr || member->is_dead() || member->connection.empty()) {
    return fail(ErrorCode::kStale,
                "node '{}' is not registered (or was taken for dead); register again", node_id);
  }
  member->last_heard = now;
  member->state = NodeState::kAlive;
  next_due_ = std::min(next_due_, now + timing_.suspect_after);
  return member;
}

void Membership::disconnect(const std::string& node_id, const Incarnation& incarnation,
                            const std::string& connection) {
  Member* member = find(node_id, incarnation);
  if (member != nullptr && member->connection == connection) member->connection.clear();
}

// Returns the time of its next change.
TimePoint Membership::advance_one(Member& member, TimePoint now, TimePoint no_death_before) const {
  const Duration silence = now - member.last_heard;
  const TimePoint dead_at = std::max({member.last_heard + timing_.dead_after,
                                      member.last_vouched + timing_.vouched_for, no_death_before});
  if (now >= dead_at) {
    member.state = NodeState::kDead;
    member.flapping.died(timing_, now);
    member.readers.clear();
    member.holdings.clear();
    return now + timing_.forget_dead_after;
  }
  if (silence >= timing_.suspect_after) {
    member.state = NodeState::kSuspect;
    return dead_at;
  }
  return member.last_heard + timing_.suspect_after;
}

void Membership::advance(TimePoint now, TimePoint no_death_before) {
  if (now < next_due_) return;
  TimePoint due = now + timing_.suspect_after;
  for (auto it = members_.begin(); it != members_.end();) {
    Member& member = it->second;
    if (member.is_dead()) {
      const TimePoint forget = member.last_heard + timing_.forget_dead_after;
      if (now > forget) {
        it = members_.erase(it);
        continue;
      }
    } else {
      due = std::min(due, advance_one(member, now, no_death_before));
    }
    ++it;
  }
  next_due_ = due;
}

void Membership::shift(Duration by) {
  for (auto& [id, member] : members_) {
    member.last_heard += by;
    member.last_vouched += by;
  }
}

const Member* Membership::find(const std::string& node_id, const Incarnation& incarnation) const {
  const auto found = members_.find(node_id);
  if (found == members_.end() || found->second.info.incarnation != incarnation) return nullptr;
  return &found->second;
}

Member* Membership::find(const std::string& node_id, const Incarnation& incarnation) {
  return const_cast<Member*>(std::as_const(*this).find(node_id, incarnation));
}

std::string_view state_name(const Member& member, TimePoint now) {
  if (member.is_dead()) return "dead";
  if (member.standing.quarantined(now)) return "quarantined";
  if (member.flapping.left_out(now)) return "flapping";
  if (member.state == NodeState::kSuspect || member.connection.empty()) return "suspect";
  return "alive";
}

}  // namespace rekindle::coordinator
