#include "recovery/coordinator/core/membership.h"

#include <utility>

namespace rekindle::coordinator {

Result<bool> Membership::enroll(const NodeInfo& info, const std::string& failure_domain,
                                const std::string& connection, TimePoint now) {
  auto found = members_.find(info.node_id);
  if (found != members_.end() && found->second.info.incarnation != info.incarnation) {
    const Member& holder = found->second;
    if (holder.state != NodeState::kDead && !holder.connection.empty()) {
      return fail(ErrorCode::kDenied,
                  "node id '{}' is in use by a live process at {}; choose another --node-id",
                  info.node_id, holder.info.control_endpoint);
    }
    members_.erase(found);
    found = members_.end();
  }
  if (found == members_.end() && members_.size() >= max_members_) {
    return fail(ErrorCode::kExhausted, "the coordinator has its {} members already", max_members_);
  }
  const bool is_new = found == members_.end() || found->second.state == NodeState::kDead;
  Member& member = members_[info.node_id];
  member.info = info;
  member.failure_domain = failure_domain;
  member.connection = connection;
  member.state = NodeState::kAlive;
  member.last_heard = now;
  return is_new;
}

Result<Member*> Membership::hear(const std::string& node_id, const Incarnation& incarnation,
                                 TimePoint now) {
  Member* member = find(node_id, incarnation);
  // Without the connection that registered it the id is free for others: it must ask for it again.
  if (member == nullptr || member->state == NodeState::kDead || member->connection.empty()) {
    return fail(ErrorCode::kStale,
                "node '{}' is not registered (or was taken for dead); register again", node_id);
  }
  member->last_heard = now;
  member->state = NodeState::kAlive;
  return member;
}

void Membership::disconnect(const std::string& node_id, const Incarnation& incarnation,
                            const std::string& connection) {
  Member* member = find(node_id, incarnation);
  if (member != nullptr && member->connection == connection) member->connection.clear();
}

void Membership::advance(TimePoint now, TimePoint no_death_before) {
  for (auto it = members_.begin(); it != members_.end();) {
    Member& member = it->second;
    const Duration silence = now - member.last_heard;
    if (member.state == NodeState::kDead) {
      it = silence > timing_.forget_dead_after ? members_.erase(it) : std::next(it);
      continue;
    }
    if (silence >= timing_.dead_after && now >= no_death_before) {
      member.state = NodeState::kDead;
      member.holdings.clear();
    } else if (silence >= timing_.suspect_after) {
      member.state = NodeState::kSuspect;
    }
    ++it;
  }
}

void Membership::shift(Duration by) {
  for (auto& [id, member] : members_) member.last_heard += by;
}

Member* Membership::find(const std::string& node_id, const Incarnation& incarnation) {
  const auto found = members_.find(node_id);
  if (found == members_.end() || found->second.info.incarnation != incarnation) return nullptr;
  return &found->second;
}

}  // namespace rekindle::coordinator
