#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/pull/pull_job.h"
#include "recovery/pull/pull_types.h"
#include "recovery/pull/pull_watch.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::agent {

// Pulls of the same thing that run at the same time are one: who comes later sees what the first
// brings as it comes, and has the same copy in the end. Control thread only.
class SharedPulls {
 public:
  using Outcome = pull::PullJob::Outcome;
  using Run = std::function<async::Task<Result<Outcome>>(pull::PullRequest, pull::OnProgress,
                                                         pull::PullWatch)>;

  // Runs the pull, or follows one like it. When that one fails it is run after all: it may have
  // been interrupted, or have other means (a fallback directory).
  async::Task<Result<Outcome>> pull(pull::PullRequest request, pull::OnProgress progress,
                                    pull::PullWatch watch, Run run);

 private:
  struct Key {
    ModelVersion id;
    std::string shard, spec_json, tensors_regex, transport;
    std::vector<pull::NamedBox> boxes;
    Digest root;
    auto operator<=>(const Key&) const = default;
  };
  struct Running {
    std::optional<pull::Arriving> arriving;
    std::optional<pull::Progress> progress;
    std::uint64_t updates = 0;  // of `progress`
    bool ended = false;
    std::optional<Outcome> outcome;
    std::list<std::function<bool()>> held;  // of each that wants it; empty ones hold nothing
  };
  // Fetches nothing only while everybody who wants it says so.
  static bool is_held(const Running& running);
  // nullopt: `latest`, or not into the store from whoever has it.
  static std::optional<Key> key_of(const pull::PullRequest& request);
  async::Task<Result<Outcome>> lead(Key key, pull::PullRequest request, pull::OnProgress progress,
                                    pull::PullWatch watch, Run run);
  // nullopt: it has failed.
  static async::Task<Result<std::optional<Outcome>>> follow(std::shared_ptr<Running> running,
                                                            pull::OnProgress progress,
                                                            pull::PullWatch watch);

  std::map<Key, std::shared_ptr<Running>> running_;
};

}  // namespace rekindle::agent
