#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/agent/agent_parts.h"
#include "recovery/agent/partial_sources.h"
#include "recovery/agent/version_retirement.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_job.h"
#include "recovery/pull/pull_types.h"
#include "recovery/pull/pull_watch.h"
#include "src/async/task.h"

namespace rekindle::agent {

// Pulls of the same thing that run at the same time become one. The first caller runs the pull; the
// others follow it: they see the arriving copy and its progress, and get the same copy in the end.
// Control thread only.
class SharedPulls {
 public:
  using Outcome = pull::PullJob::Outcome;
  using Run = std::function<async::Task<Result<Outcome>>(pull::PullRequest, pull::OnProgress,
                                                         pull::PullWatch)>;

  // Runs the pull, or follows one like it. When that one fails, one of its followers runs its own:
  // the first may have been interrupted, or lack the follower's fallback directory.
  async::Task<Result<Outcome>> pull(pull::PullRequest request, pull::OnProgress progress,
                                    pull::PullWatch watch, Run run);

 private:
  struct Key {
    ModelVersion id;
    std::string shard, spec_json, tensors_regex, transport;
    std::vector<pull::NamedBox> boxes;
    Digest root;
    bool encrypt = false;
    auto operator<=>(const Key&) const = default;
  };
  class Running;
  // nullopt: pulls of `latest`, from named agents or into a directory are not shared.
  static std::optional<Key> key_of(const pull::PullRequest& request);
  async::Task<Result<Outcome>> lead(Key key, pull::PullRequest request, pull::OnProgress progress,
                                    pull::PullWatch watch, Run run);
  // nullopt: the other pull has failed.
  static async::Task<Result<std::optional<Outcome>>> follow(std::shared_ptr<Running> running,
                                                            pull::OnProgress progress,
                                                            pull::PullWatch watch);

  std::map<Key, std::shared_ptr<Running>> running_;
};

// Runs pulls on this host and serves their copies. Control thread only.
class AgentPulls {
 public:
  using Outcome = pull::PullJob::Outcome;

  AgentPulls(AgentParts parts, const VersionRetirement& retirement, PartialSources& sources,
             const pull::PullEnvironment& environment)
      : parts_(parts), retirement_(retirement), sources_(sources), environment_(environment) {}

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
  async::Task<Result<Outcome>> run_alone(pull::PullRequest request, pull::OnProgress progress,
                                         pull::PullWatch watch);

  const AgentParts parts_;
  const VersionRetirement& retirement_;
  PartialSources& sources_;
  const pull::PullEnvironment& environment_;
  SharedPulls shared_;
};

}  // namespace rekindle::agent
