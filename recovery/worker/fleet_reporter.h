#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "recovery/worker/agent_host.h"
#include "recovery/worker/local_instances.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

// What the coordinator's verdicts do to the ranks on this host.
class RankEffects {
 public:
  virtual ~RankEffects() = default;
  virtual void fail_rank(SessionId session, const Error& why) = 0;
  virtual void apply(LocalInstances::Entry& entry, const Instance::Change& change) = 0;
};

// Reports the ranks here to the coordinator, for instances whose ranks may live on several hosts:
// on every change, and twice a second. The coordinator's verdict decides for such an instance.
// FleetReport holds the rules. Control thread only.
class FleetReporter {
 public:
  // All references outlive this. `hear_ranks`: how long a new coordinator may take to hear of all
  // ranks.
  FleetReporter(FleetHost& host, LocalInstances& instances, RankEffects& effects,
                async::TaskGroup& tasks, boost::asio::any_io_executor executor,
                std::chrono::milliseconds hear_ranks)
      : host_(host),
        instances_(instances),
        effects_(effects),
        tasks_(tasks),
        hear_ranks_(hear_ranks),
        news_(std::move(executor)) {}

  // Ranks of the instance may live on other hosts.
  bool spans(const LocalInstances::Entry& entry) const;
  void ranks_changed(LocalInstances::Entry& entry);
  // A rank has detached. Its report is made before the instance may be forgotten.
  void rank_detached(const LocalInstances::Entry& entry, std::uint32_t rank);
  // The newest version, chosen by the coordinator for all ranks of the instance's generation.
  async::Task<Result<ModelVersion>> newest_for(std::string instance, std::uint32_t rank);

 private:
  async::Task<void> run();
  async::Task<void> report_instance(std::string name);
  async::Task<void> report_once(RankReport report);

  FleetHost& host_;
  LocalInstances& instances_;
  RankEffects& effects_;
  async::TaskGroup& tasks_;
  const std::chrono::milliseconds hear_ranks_;
  std::uint64_t last_change_ = 0;  // of any instance
  std::uint64_t last_report_ = 0;  // its sequence number
  bool running_ = false;
  bool changed_ = false;  // since the last round of reports began
  async::Notifier news_;
};

}  // namespace rekindle::worker
