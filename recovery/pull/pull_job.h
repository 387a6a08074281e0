#pragma once

#include <memory>

#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_types.h"
#include "recovery/pull/pull_watch.h"
#include "src/async/task.h"
#include "src/store/segment_store.h"

namespace rekindle::pull {

// One pull, from a model's name to a committed copy in the store: resolve → plan → transfer →
// commit, and plan again with fresh sources when the old ones are gone. What has verified is never
// fetched again, not even by a later job for the same thing. Control thread only.
class PullJob {
 public:
  PullJob(const PullEnvironment& environment, PullRequest request, OnProgress progress,
          PullTimes times = {}, PullWatch watch = {});
  ~PullJob();

  struct Outcome {
    TransferSummary summary;
    std::shared_ptr<const store::StoredVersion> stored;
  };
  async::Task<Result<Outcome>> run();
  async::Task<Result<PlanSummary>> plan_only();

 private:
  class Driver;
  const std::unique_ptr<Driver> driver_;
};

}  // namespace rekindle::pull
