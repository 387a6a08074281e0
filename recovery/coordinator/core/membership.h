#pragma once

#include <map>
#include <set>
#include <string>

#include "recovery/coordinator/core/flapping.h"
#include "recovery/coordinator/core/health.h"
#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

struct Member {
  NodeInfo info;
  std::string failure_domain;
  std::string connection;  // names the connection that registered it; "" once that has closed
  NodeState state = NodeState::kAlive;
  TimePoint last_heard;
  TimePoint last_vouched{};  // a puller said that bytes came from it
  std::uint64_t progress = 0;
  std::map<HoldingKey, Holding> holdings;
  // Of versions whose claim is being made durable.
  std::map<HoldingKey, Holding> unclaimed;
  std::uint64_t store_free_bytes = 0;  // as it last said; 0 also when it does not say
  // Of versions that it lets no new reader in to, as it said in its last heartbeat.
  std::map<ModelVersion, std::uint32_t> readers;
  // Versions that it has leave to let go of, until when: these copies count for nobody else's
  // leave.
  std::map<ModelVersion, TimePoint> leaving;
  Flapping flapping;
  // As pullers judge it.
  TimePoint lost_until{};
  TimePoint quarantined_until{};
  std::set<Incarnation> struck_by;  // the pullers that said so, of this quarantine
  std::uint32_t strikes = 0;
  SourceHealth health;

  bool alive(TimePoint now) const {
    return state == NodeState::kAlive && !connection.empty() && lost_until <= now;
  }
  bool leaves(const ModelVersion& id, TimePoint now) const {
    const auto found = leaving.find(id);
    return found != leaving.end() && found->second > now;
  }
  bool holds_any(const ModelVersion& id) const {
    const auto first = holdings.lower_bound({id, {}});
    return first != holdings.end() && first->first.id == id;
  }
  // What fails together with it; nodes that do not say fail with their host.
  std::string domain() const;
};

// Who is in the fleet and how alive. One node id, one live incarnation: the holder keeps it until
// it is dead or its connection has closed. One that is silent but from which pullers still read is
// cut off from here, not dead: it stays suspect.
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
  // Moves states on; cheap while nobody is due. Nobody dies before `no_death_before`.
  void advance(TimePoint now, TimePoint no_death_before);
  // Time during which the coordinator itself slept does not count against anyone.
  void shift(Duration by);

  Member* find(const std::string& node_id, const Incarnation& incarnation);
  const std::map<std::string, Member>& all() const { return members_; }
  std::map<std::string, Member>& all() { return members_; }

 private:
  TimePoint advance_one(Member& member, TimePoint now, TimePoint no_death_before) const;

  const Timing timing_;
  const std::size_t max_members_;
  TimePoint next_due_{};                   // no state changes before it
  std::map<std::string, Member> members_;  // by node id
};

}  // namespace rekindle::coordinator
