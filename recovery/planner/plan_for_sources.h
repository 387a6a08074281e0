#pragma once

#include <memory>
#include <vector>

#include "recovery/planner/slice_plan.h"

namespace rekindle::planner {

// A plan whose sources stand for classes of sources, as a plan over the sources of one pull: source
// i belongs to class `class_of[i]`, which is a source of `by_class`. Each class has a source. All
// sources of a class have the same layout, so the slices are those of a plan that was made over the
// sources themselves.
std::shared_ptr<const Plan> plan_for_sources(std::shared_ptr<const Plan> by_class,
                                             std::vector<SourceIndex> class_of);

}  // namespace rekindle::planner
