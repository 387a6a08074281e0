#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/planner/random_plan.h"

namespace rekindle::planner::testing {

// Carries a plan out on memory, byte by byte and in random order, and holds it against what a look
// at each single element says. Failures are one line each; empty means the plan is right.
std::vector<std::string> check_plan(const Scenario& scenario, const Plan& plan, Random& random);

// XXH3 over all that a plan says of itself.
Digest digest_plan(const Plan& plan);

}  // namespace rekindle::planner::testing
