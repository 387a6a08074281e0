#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>

#include "recovery/coordinator/core/core.h"

// Mistakes that the simulation must find.
namespace rekindle::sim {

enum class SeededBug {
  kNone,
  // An agent that saw a later term is taken on below it.
  kEpochNotRaised,
  // A node id is given away while its holder lives.
  kIdTaken,
  // A dead node stays in the plans.
  kDeadOffered,
  // A drained node is put into new plans.
  kDrainedOffered,
  // Closing a pull keeps its shares.
  kShareLeakedAtClose,
  // `latest` ignores versions whose holders have yet to report.
  kLatestGoesBack,
  // A retired version is dropped from the table.
  kTombstoneForgotten,
  // A holder is told to let go while somebody reads.
  kRetiredUnderReaders,
  // A version short of copies gets a second task beside the first.
  kTwoRecopies,
  // An instance is committed while a rank still loads.
  kCommitWithoutAll,
  // `latest` is resolved for each rank by itself.
  kResolvedTwice,
};

// The bug of this run.
inline SeededBug seeded_bug = SeededBug::kNone;

// The real core with at most one mistake, made in its calls and answers.
class FaultyCore : public coordinator::Core {
 public:
  using Core::Core;

  std::optional<coordinator::CommitBatch> take_batch();
  coordinator::Durably<coordinator::Registered> enroll(const coordinator::NodeInfo& info,
                                                       const std::string& failure_domain,
                                                       std::uint64_t highest_epoch,
                                                       const std::string& connection,
                                                       TimePoint now);
  Result<coordinator::HeartbeatAnswer> heartbeat(const std::string& node_id,
                                                 const Incarnation& incarnation,
                                                 coordinator::Heartbeat heartbeat, TimePoint now);
  coordinator::Announced announce(const std::string& node_id, const Incarnation& incarnation,
                                  std::uint64_t epoch, bool full,
                                  std::vector<coordinator::Holding> add,
                                  const std::vector<coordinator::HoldingKey>& remove,
                                  TimePoint now);
  Result<coordinator::OpenedPull> open_pull(coordinator::OpenPullRequest request, TimePoint now);
  Result<void> close_pull(const PullId& pull_id, const Incarnation& puller, TimePoint now);
  coordinator::Durably<coordinator::Draining> drain(const std::string& node_id, bool drained,
                                                    TimePoint now);
  Result<coordinator::InstanceAnswer> report_rank(const coordinator::RankReport& report,
                                                  TimePoint now);

 private:
  // The last holding that each process announced.
  std::map<Incarnation, coordinator::Holding> announced_;
  // Nodes whose drain the core never saw.
  std::set<std::string> drained_in_secret_;
};

}  // namespace rekindle::sim
