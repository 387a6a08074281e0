#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "proto/worker.pb.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/worker_client.h"
#include "recovery/worker/worker_wire.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

// Calls of workers that have the fleet's members of a group updated by a broadcast round. An update
// goes on even if its caller is gone. Control thread only.
class UpdateCalls {
 public:
  // Both outlive this.
  UpdateCalls(FleetHost& fleet, async::TaskGroup& tasks) : fleet_(fleet), tasks_(tasks) {}

  // kExhausted: the worker has too many calls under way.
  Result<void> begin(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame);

 private:
  async::Task<void> run(std::shared_ptr<Client> client, proto::WorkerFrame frame);
  async::Task<Result<proto::Updated>> update(std::shared_ptr<Client> client, UpdateOrder order,
                                             TimePoint give_up);

  FleetHost& fleet_;
  async::TaskGroup& tasks_;
  std::map<ClientId, std::size_t> under_way_;
};

}  // namespace rekindle::worker
