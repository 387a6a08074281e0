#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "proto/coordinator.pb.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

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
// for each worker that is not ready or came by other means.
std::string update_text(const proto::RoundStatus& round);
std::string rounds_table(const proto::ClusterStatusResponse& status);
Json to_json(const proto::RoundStatus& round);

}  // namespace rekindle::cli
