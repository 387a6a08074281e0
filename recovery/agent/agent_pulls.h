#pragma once

#include "recovery/agent/agent_parts.h"
#include "recovery/agent/copy_serving.h"
#include "recovery/agent/shared_pulls.h"
#include "recovery/agent/version_retirement.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_job.h"

namespace rekindle::agent {

// Runs pulls on this host and serves their copies. Control thread only.
class AgentPulls {
 public:
  using Outcome = pull::PullJob::Outcome;

  AgentPulls(AgentParts parts, const VersionRetirement& retirement, CopyServing& serving,
             const pull::PullEnvironment& environment)
      : parts_(parts), retirement_(retirement), serving_(serving), environment_(environment) {}

  // Pulls of the same thing that run at the same time become one: see SharedPulls.
  async::Task<Result<Outcome>> pull(pull::PullRequest request, pull::OnProgress progress,
                                    pull::PullWatch watch = {});
  // Always runs a pull of its own.
  async::Task<Result<Outcome>> pull_alone(pull::PullRequest request, pull::OnProgress progress,
                                          pull::PullWatch watch);
  // Pulls a whole copy because the coordinator wants one here, at the rate of its grants.
  async::Task<Result<void>> fetch_replica(ModelVersion id);
  async::Task<Result<pull::PlanSummary>> plan(pull::PullRequest request);

 private:
  const AgentParts parts_;
  const VersionRetirement& retirement_;
  CopyServing& serving_;
  const pull::PullEnvironment& environment_;
  SharedPulls shared_;
};

}  // namespace rekindle::agent
