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

// Which rail of the puller reads from which rail of the source: one pair per local rail. Rails at
// half of the fastest one's speed or more are used together; slower ones only when those reach
// nothing. Within a fabric (link layer, InfiniBand subnet, IP version) the source rails that share
// the most leading bytes of the address are taken, so that rail-optimised networks pair up rail by
// rail; those that share equally many are shared evenly, then by bits. Pure. kUnavailable: no
// common fabric, naming what both sides have.
Result<std::vector<RailPair>> choose_rail_pairs(std::span<const RailInfo> local,
                                                std::span<const RailInfo> remote);

}  // namespace rekindle::transport::verbs
