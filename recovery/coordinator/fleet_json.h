#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/fleet_watch.h"

// The answers of the status page's API (docs/reference/http-api.md). They have no clock in them, so
// that the answer about a fleet at rest stays the same text.
namespace rekindle::coordinator {

// The system's clock at the same moment as `now`.
struct Moment {
  TimePoint now;
  WallTime at;
};

std::string fleet_json(const Core& core, const FleetWatch& watch, const Moment& moment);
// "null": no such pull runs.
std::string pull_json(const Core& core, const PullId& id, const Moment& moment);
// The events after `after`, at most 512.
std::string events_json(const FleetWatch& watch, std::uint64_t after);
// Of a coordinator that does not lead.
std::string standby_json(const std::string& why);
std::string error_json(const std::string& error);

// How much of each of `cells` equal parts of [0, tiles) the runs cover: one character a part, "0"
// for nothing to "9" for all of it. Fewer cells where there are fewer tiles.
std::string have_map(const TileRuns& runs, std::uint32_t tiles, std::size_t cells);

}  // namespace rekindle::coordinator
