#pragma once

#include <string>
#include <vector>

#include "proto/agent.pb.h"
#include "proto/common.pb.h"
#include "proto/coordinator.pb.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

Json to_json(const proto::ClusterStatusResponse& status);
std::string to_text(const proto::ClusterStatusResponse& status);
Json to_json(const proto::AgentStatusResponse& status);
std::string to_text(const proto::AgentStatusResponse& status);

// The copies of a store: their states when they were last read, and what was found.
Json to_json(const proto::CopyStatus& copy);
std::string copies_text(const std::vector<proto::CopyStatus>& copies);

}  // namespace rekindle::cli
