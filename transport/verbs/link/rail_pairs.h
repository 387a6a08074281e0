#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "transport/verbs/link/verbs_wire.h"

namespace rekindle::transport::verbs {

struct RailPair {
  std::uint32_t local = 0;   // index of the puller's rail
  std::uint32_t remote = 0;  // index of the source's rail
  bool operator==(const RailPair&) const = default;
};

// Chooses which rail of the puller reads from which rail of the source: one pair per local rail.
//
// Rails with at least half of the fastest one's speed are used together; slower ones only if those
// reach nothing. Rails can reach each other within a fabric: the same link layer, InfiniBand subnet
// or IP version. A rail takes the source rail whose address shares the most leading bytes with its
// own, so that rail-optimised networks pair up rail by rail. Source rails that are equal in that
// are shared evenly, then compared by bits. Pure. kUnavailable: there is no common fabric; the
// message names the rails of both sides.
Result<std::vector<RailPair>> choose_rail_pairs(std::span<const RailInfo> local,
                                                std::span<const RailInfo> remote);

}  // namespace rekindle::transport::verbs
