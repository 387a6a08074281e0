#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

// One agent's report on a joint publication.
struct JointReport {
  std::string node_id;
  Incarnation incarnation;
  ModelVersion id;
  std::uint32_t world = 0;
  // The ranks that have declared at this agent.
  std::vector<std::uint32_t> ranks;
  // The agent takes no part any more.
  bool leave = false;
  // Names the agent's attempt. A report of another attempt replaces those of the earlier one, and a
  // leave of an earlier one is ignored.
  std::uint64_t attempt = 0;
};
struct JointRoster {
  struct Host {
    NodeInfo node;
    // Ascending.
    std::vector<std::uint32_t> ranks;
  };
  // 0: not complete.
  std::uint64_t number = 0;
  // Of a complete roster, by their lowest rank.
  std::vector<Host> hosts;
  // The lowest ranks that are missing, at most 16.
  std::vector<std::uint32_t> missing;
  std::uint32_t missing_total = 0;
};

// Which rank is at which agent, for each version that ranks on several hosts publish together
// (docs/internals/joint-publication.md). A roster is complete when every rank of the world is at
// exactly one live node. It then has a number, and stays as it is until one of its nodes dies,
// leaves or reports other ranks. Such a loss dissolves the roster: all its nodes must report anew,
// because some of them may already work with the number. Nothing is durable: after a restart the
// agents report again.
class JointRosters {
 public:
  // A node's report replaces its earlier one for the same version. An error changes nothing.
  // kInvalid: the report contradicts itself. kDenied: it contradicts a report of another live node.
  // kExhausted: too many versions. `node` is the live member that reports.
  Result<void> report(const JointReport& report, const NodeInfo& node, const Membership& members,
                      std::uint64_t epoch, TimePoint now);
  // Nodes that are no longer alive or are another incarnation, and reports that were not repeated.
  void advance(const Membership& members, TimePoint now);
  // Drops the reports of these nodes.
  void lose_if(const std::function<bool(const NodeInfo& node, const ModelVersion& id)>& gone);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);

  // False once the report's node has lost its part, or the roster was dissolved.
  bool stands(const JointReport& report) const;
  bool is_complete(const ModelVersion& id) const;
  // Empty if nobody has reported.
  JointRoster roster_of(const ModelVersion& id) const;
  // Grows whenever a roster becomes complete or loses a node.
  std::uint64_t revision() const { return revision_; }
  // The number of versions with a report.
  std::size_t size() const { return gatherings_.size(); }

 private:
  struct Report {
    NodeInfo node;
    // Ascending.
    std::vector<std::uint32_t> ranks;
    TimePoint last_heard;
    std::uint64_t attempt = 0;
  };
  struct Gathering {
    std::uint32_t world = 0;
    // By node id.
    std::map<std::string, Report> reports;
    // For each rank, whether a report has it.
    std::vector<bool> declared;
    std::uint32_t declared_count = 0;
    // 0: not complete.
    std::uint64_t number = 0;
    // Of all nodes.
    TimePoint last_heard;
  };
  using Gatherings = std::map<ModelVersion, Gathering>;

  static Result<void> check(const JointReport& report, const std::vector<std::uint32_t>& ranks);
  static Result<void> check_others(const Gathering& gathering, const JointReport& report,
                                   const std::vector<std::uint32_t>& ranks);
  static void mark(Gathering& gathering, const std::vector<std::uint32_t>& ranks, bool declared);
  // The node has no part any more. A complete roster is dissolved.
  void lose(Gathering& gathering, const std::string& node_id);
  void lose_dead(Gathering& gathering, const Membership& members);

  Gatherings gatherings_;
  TimePoint next_look_{};
  std::uint64_t last_number_ = 0;
  std::uint64_t revision_ = 1;
};

}  // namespace rekindle::coordinator
