#pragma once

#include "proto/drill.pb.h"
#include "recovery/agent/rdma.h"
#include "recovery/rpc/rpc.h"
#include "src/base/result.h"
#include "transport/link_cuts.h"

namespace rekindle::agent {

// The agent's part in `rekindle drill cut-link`: CutLinks and ListRoutes. `rdma`: nullptr if
// this host has none.
Result<proto::DrillResponse> answer_link_drill(transport::LinkCuts& links, const Rdma* rdma,
                                               const rpc::Peer& peer,
                                               const proto::DrillRequest& request);

}  // namespace rekindle::agent
