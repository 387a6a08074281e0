#pragma once

#include <cstdint>

#include "proto/agent.pb.h"
#include "recovery/agent/rdma.h"
#include "recovery/metrics/metrics.h"
#include "recovery/worker/residents.h"
#include "recovery/worker/scrubber.h"

namespace rekindle::agent {

// The figures of an agent that `rekindle status` does not show.
struct AgentFigures {
  std::uint64_t epoch = 0;
  std::uint64_t pooled_bytes = 0;
  std::uint64_t tcp_connections = 0;
  WindowFigures windows;
  worker::ScrubTotals scrub;
  worker::ResidentTotals residents;
};

// Reads the metrics of a host. No label comes from a user: names of models, nodes and instances
// would make the number of series grow without bound.
void read_agent(const proto::AgentStatusResponse& status, const AgentFigures& figures,
                metrics::Readings& readings);

}  // namespace rekindle::agent
