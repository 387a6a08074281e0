#pragma once

#include "proto/local.pb.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/local_instances.h"
#include "recovery/worker/order_desk.h"
#include "recovery/worker/worker_sessions.h"
#include "src/async/task.h"

namespace rekindle::worker {

struct SwitchParts {  // all outlive the switch
  CopyHost& copies;
  const LocalInstances& instances;
  const WorkerSessions& sessions;
  OrderDesk& orders;
  EventLog& events;
};

// Has all ranks of an instance serve another version, or a version of another model, of which this
// host has a copy (`rekindle switch`). Nothing changes before every rank can take the order.
// kNotFound: the instance, or a copy here. kUnavailable: ranks of the instance live elsewhere, or
// it is not ready. kTimeout: a rank did not take the order, or has not answered. Other errors are
// those of the ranks; the message says what the instance serves then.
async::Task<Result<proto::LocalSwitchResponse>> switch_model(SwitchParts parts,
                                                             proto::LocalSwitchRequest request);

}  // namespace rekindle::worker
