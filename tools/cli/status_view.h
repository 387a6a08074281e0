#pragma once

#include <string>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

Json to_json(const proto::ClusterStatusResponse& status);
std::string to_text(const proto::ClusterStatusResponse& status);
Json to_json(const proto::AgentStatusResponse& status);
std::string to_text(const proto::AgentStatusResponse& status);

}  // namespace rekindle::cli
