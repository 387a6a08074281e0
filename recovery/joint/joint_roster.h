#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "recovery/joint/course.h"
#include "recovery/joint/joint_agent.h"
#include "recovery/joint/joint_peer.h"
#include "recovery/joint/local_ranks.h"
#include "src/base/ids.h"

namespace rekindle::joint {

// The agents of a complete roster, as one of them sees them.
struct Roster {
  struct Host {
    proto::NodeAddress node;
    std::vector<std::uint32_t> ranks;
    std::unique_ptr<JointPeer> peer;
  };
  ModelVersion id;
  std::uint64_t number = 0;
  // The first one is the lead.
  std::vector<Host> hosts;
  std::uint32_t self = 0;

  // `over`: as for JointPeer. kInvalid: the roster does not have `identity`.
  static Result<Roster> from_proto(const ModelVersion& id, const proto::JointRoster& roster,
                                   const rpc::Identity& identity, std::function<bool()> over);
  JointPeer& lead() const { return *hosts.front().peer; }
  bool leads() const { return self == 0; }
  std::span<const std::uint32_t> ranks() const { return hosts[self].ranks; }
  // A call of this agent, without its step.
  proto::JointRequest request() const;
};

// This agent's reports on a joint publication to the coordinator. Control thread only.
class RankReports {
 public:
  // All outlive it.
  RankReports(JointAgent& agent, const LocalRanks& ranks, Course& course);

  // Reports the ranks that are present until the roster is complete. It ends with the publication,
  // which has no rank to report for at most a second before it is given up.
  async::Task<Result<Roster>> gather();
  // The ranks that have declared nowhere, as the coordinator knows: "missing: rank 3".
  std::string missing() const;
  // Repeats the report until the publication is over. The coordinator forgets a roster that nobody
  // reports. While it knows the roster, it refuses the same ranks at other agents.
  async::Task<void> keep(std::span<const std::uint32_t> ranks);
  async::Task<void> leave();

 private:
  proto::JointReport report_on(std::span<const std::uint32_t> ranks) const;
  void note_missing(const Result<proto::JointRoster>& roster);

  JointAgent& agent_;
  const LocalRanks& ranks_;
  Course& course_;
  // Tells the coordinator this publication from an earlier one of the same version.
  const std::uint64_t attempt_;
  std::string missing_;
};

}  // namespace rekindle::joint
