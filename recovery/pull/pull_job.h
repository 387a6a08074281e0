#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "recovery/pull/pull_context.h"
#include "recovery/pull/pull_destination.h"
#include "recovery/pull/pull_rounds.h"
#include "recovery/pull/pull_watch.h"
#include "recovery/pull/source_plan.h"
#include "recovery/pull/source_pool.h"
#include "recovery/pull/target_resolver.h"
#include "recovery/pull/transfer.h"
#include "src/async/task.h"

namespace rekindle::pull {

// One pull, from a model's name to a committed copy in the store: resolve → plan → transfer →
// commit, and plan again with fresh sources when the old ones are gone. What has verified is never
// fetched again, not even by a later job for the same thing. Control thread only.
class PullJob {
 public:
  PullJob(const PullEnvironment& environment, PullRequest request, OnProgress progress,
          PullTimes times = {}, PullWatch watch = {});

  struct Outcome {
    TransferSummary summary;
    std::shared_ptr<const store::StoredVersion> stored;
  };
  async::Task<Result<Outcome>> run();
  async::Task<Result<PlanSummary>> plan_only();

 private:
  async::Task<Result<Outcome>> run_phases();
  async::Task<Result<void>> transfer_all();
  async::Task<Result<void>> find_more_sources(const planner::Plan& plan);
  async::Task<Result<void>> transfer_once(std::shared_ptr<const planner::Plan> plan);
  async::Task<Result<void>> transfer_and_recruit(Transfer& transfer);
  Transfer::Options transfer_options(std::shared_ptr<const planner::Plan> plan);
  PlanInputs plan_inputs();
  PullRounds::Next next(const planner::Plan& plan);
  Error no_source_error(const planner::Plan& plan);
  TransferSummary summarize(const store::StoredVersion& stored);
  void enter_phase(const std::string& name) { context_.progress.enter_phase(name, steady_now()); }

  const WantedSpec wanted_spec_;
  PullContext context_;
  SourcePool sources_;
  TargetResolver resolver_;
  PullDestination destination_;
  PullRounds rounds_;
  const std::shared_ptr<PullCounters> counters_ = std::make_shared<PullCounters>();
  std::set<std::string> failed_transports_;  // that the user has heard of
  std::string wrong_together_;               // what several sources brought, last time
  std::uint32_t suspicion_ = 0;              // see SliceCandidates
  std::uint64_t resumed_bytes_ = 0;
};

}  // namespace rekindle::pull
