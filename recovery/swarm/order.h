#pragma once

#include <cstdint>
#include <vector>

#include "recovery/planner/plan.h"
#include "src/base/ids.h"

namespace rekindle::swarm {

// Where a puller begins and how it goes on, from its incarnation.
std::uint64_t salt_of(const Incarnation& incarnation);

// Each slice once: bucket by bucket, the buckets in an order of this salt's own. Pullers of the
// same thing so fetch different parts of it first and have something to give each other. Slices of
// a bucket, and with them those of a group, stay together.
std::vector<transport::SliceIndex> slice_order(const planner::Plan& plan, std::uint64_t salt);

}  // namespace rekindle::swarm
