#pragma once

#include <string>

#include "proto/agent.pb.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

// The instances of an agent and the workers in them.
Json instances_json(const proto::AgentStatusResponse& status);
// "" without any.
std::string instances_text(const proto::AgentStatusResponse& status);

Json to_json(const proto::AgentEvent& event);
// 2026-11-21T20:31:04.123456Z i/0 pid 4711 m@41 local committed: wire 1200.0 ms, install 3.1 ms
std::string to_line(const proto::AgentEvent& event);

}  // namespace rekindle::cli
