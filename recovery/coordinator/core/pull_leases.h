#pragma once

#include <functional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/fleet_state.h"
#include "recovery/coordinator/core/pull_table.h"
#include "recovery/coordinator/core/replicas.h"
#include "recovery/coordinator/core/source_selection.h"
#include "recovery/coordinator/core/version_readiness.h"

namespace rekindle::coordinator {

struct OpenedPull {
  // Nil when the pull waits.
  PullId pull_id;
  ModelVersion id;
  DurableVersion version;
  std::vector<VersionSignature> signatures;
  std::uint64_t epoch = 0;
  Duration lease{};
  // Empty without `retry_after`: the puller has all of it itself.
  std::vector<SourceOffer> sources;
  // Above 0: no source has a free share now.
  Duration retry_after{};
};
struct PullProgress {
  PullId pull_id;
  NodeInfo puller;
  ModelVersion id;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  std::vector<SourceReport> sources;
};
struct PullProgressAnswer {
  std::vector<SourceOffer> sources;
  bool grace = false;
};

// Opens pulls, renews their leases with each progress report, and ends them. A report may give the
// pull other sources, and it decides the standing of the sources it names.
class PullLeases {
 public:
  PullLeases(FleetState& fleet, const VersionResolver& resolver, Replicas& replicas,
             const Rounds& rounds, std::function<PullId()> new_pull_id);

  Result<OpenedPull> open(const OpenPullRequest& request, TimePoint now);
  Result<PullProgressAnswer> progress(const PullProgress& progress, TimePoint now);
  Result<void> close(const PullId& pull_id, const Incarnation& puller, TimePoint now) {
    return table_.close(pull_id, puller, now);
  }
  void expire(TimePoint now);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);

  const PullTable& table() const { return table_; }
  std::size_t waiting() const { return queue_.size(); }

 private:
  // The number of new shares that the pull may take, considering the pulls that wait longer.
  std::size_t fair_count(const Pull& pull, bool runs, TimePoint now) const;
  Duration queue_hint(const ModelVersion& id, TimePoint now) const;
  // The pull of a report. After a restart the coordinator knows no pulls; their reports bring them
  // back during the grace period. kStale: the grace is over, and nobody has opened such a pull.
  Result<Pull*> find_or_adopt(const PullProgress& progress, TimePoint now);
  void adopt_shares(Pull& pull, const std::vector<SourceReport>& reports);
  // Compares the sources of one puller with each other.
  void judge_rates(const Pull& pull, const std::vector<SourceReport>& reports, TimePoint now);
  void take_reports(Pull& pull, const std::vector<SourceReport>& reports, TimePoint now);

  FleetState& fleet_;
  const VersionResolver& resolver_;
  Replicas& replicas_;
  std::function<PullId()> new_pull_id_;
  PullTable table_;
  PullQueue queue_;
  SourceSelection selection_;
  TimePoint next_expiry_{};
};

}  // namespace rekindle::coordinator
