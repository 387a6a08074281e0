#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/worker.pb.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/round_driver.h"
#include "recovery/worker/worker_connections.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

// Calls of workers that wait for a newer version. A session of a group hears of updates by a round,
// any other session of the newest READY version. Control thread only.
class VersionWatch {
 public:
  // All references outlive this.
  VersionWatch(CopyHost& host, RoundDriver& rounds, async::TaskGroup& tasks)
      : host_(host), rounds_(rounds), tasks_(tasks) {}

  // A session has one such call: a second one replaces the first. kExhausted: too many wait.
  Result<void> watch(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame);
  // The session has ended. Its call is not answered.
  void forget(SessionId session);

 private:
  struct Watcher {
    std::weak_ptr<Client> client;
    std::uint64_t call = 0;
    SessionId session = 0;
    ModelVersion have;
    TimePoint deadline;
  };
  using Newest = std::map<std::string, ModelVersion>;  // by model
  async::Task<void> run();
  async::Task<Newest> ask_for_newest();
  // Answers the calls that have news, and those whose time is up.
  void answer(const Newest& newest);
  std::optional<ModelVersion> news_for(const Watcher& watcher, const Newest& newest) const;

  CopyHost& host_;
  RoundDriver& rounds_;
  async::TaskGroup& tasks_;
  std::vector<Watcher> watchers_;
  bool running_ = false;
};

}  // namespace rekindle::worker
