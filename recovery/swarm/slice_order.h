#pragma once

#include <cstdint>
#include <vector>

#include "recovery/planner/plan.h"
#include "src/base/ids.h"

namespace rekindle::swarm {

// The seed of a puller's order, from its incarnation.
std::uint64_t order_seed(const Incarnation& incarnation);

// Each slice once, bucket by bucket. Every seed gives another order of the buckets: pullers of the
// same version fetch different parts of it first and have something to give each other. The slices
// of a bucket stay together, and so do those of a group.
std::vector<transport::SliceIndex> slice_order(const planner::Plan& plan, std::uint64_t seed);

}  // namespace rekindle::swarm
