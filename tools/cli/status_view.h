#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/agent.pb.h"
#include "proto/common.pb.h"
#include "proto/coordinator.pb.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

// "qwen3@41", printable.
std::string name_of(const proto::ModelVersion& id);

Json to_json(const proto::ClusterStatusResponse& status);
std::string to_text(const proto::ClusterStatusResponse& status);
Json to_json(const proto::AgentStatusResponse& status);
std::string to_text(const proto::AgentStatusResponse& status);

// The copies of a store: their states when they were last read, and what was found.
Json to_json(const proto::CopyStatus& copy);
std::string copies_text(const std::vector<proto::CopyStatus>& copies);

struct RoundCounts {
  std::size_t members = 0;
  // Attached to the version, or failed before.
  std::size_t arrived = 0;
  std::size_t ready = 0;
  // Ready members that got every byte by broadcast.
  std::size_t by_broadcast = 0;
  // Of all members that have reported it.
  std::uint64_t bytes = 0;
  std::uint64_t ready_bytes = 0;
  std::uint64_t spread_bytes = 0;
};
RoundCounts count(const proto::RoundStatus& round);

// "update m@2: 8 of 8 workers ready, 8 by broadcast, 64 GiB in 0.51 s (gather 0.12, …)", and a line
// for each worker that is not ready or came by other means; then a table of the phases, if any rank
// has reported them.
std::string update_text(const proto::RoundStatus& round);
std::string rounds_table(const proto::ClusterStatusResponse& status);
Json to_json(const proto::RoundStatus& round);

// The instances of an agent and the workers in them.
Json instances_json(const proto::AgentStatusResponse& status);
// "" without any.
std::string instances_text(const proto::AgentStatusResponse& status);

Json to_json(const proto::FleetEvent& event);
std::string to_line(const proto::FleetEvent& event);
Json to_json(const proto::AgentEvent& event);
// 2026-11-21T20:31:04.123456Z i/0 pid 4711 m@41 local committed: wire 1200.0 ms, install 3.1 ms
std::string to_line(const proto::AgentEvent& event);

}  // namespace rekindle::cli
