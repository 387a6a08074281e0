#pragma once

#include <map>
#include <string>

#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

struct Member {
  NodeInfo info;
  std::string failure_domain;
  std::string connection;  // names the connection that registered it; "" once that has closed
  NodeState state = NodeState::kAlive;
  TimePoint last_heard;
  std::uint64_t progress = 0;
  std::map<HoldingKey, Holding> holdings;
  // As pullers judge it.
  TimePoint lost_until{};
  TimePoint quarantined_until{};
  std::uint32_t strikes = 0;
};

// Who is in the fleet and how alive. One node id, one live incarnation: the holder keeps it until
// it is dead or its connection has closed.
class Membership {
 public:
  Membership(const Timing& timing, std::size_t max_members)
      : timing_(timing), max_members_(max_members) {}

  // kDenied: the id is in use by a live process. Returns true when this incarnation is new here
  // (whatever another one held is gone).
  Result<bool> enroll(const NodeInfo& info, const std::string& failure_domain,
                      const std::string& connection, TimePoint now);
  // Heard from it. kStale: not the live incarnation of that id; it must register again.
  Result<Member*> hear(const std::string& node_id, const Incarnation& incarnation, TimePoint now);
  // Its connection ended. Ignored when it has registered over a newer one.
  void disconnect(const std::string& node_id, const Incarnation& incarnation,
                  const std::string& connection);
  // Moves states on. Nobody dies before `no_death_before`.
  void advance(TimePoint now, TimePoint no_death_before);
  // Time during which the coordinator itself slept does not count against anyone.
  void shift(Duration by);

  Member* find(const std::string& node_id, const Incarnation& incarnation);
  const std::map<std::string, Member>& all() const { return members_; }
  std::map<std::string, Member>& all() { return members_; }

 private:
  const Timing timing_;
  const std::size_t max_members_;
  std::map<std::string, Member> members_;  // by node id
};

}  // namespace rekindle::coordinator
