#pragma once

#include "recovery/coordinator/core/core.h"
#include "recovery/metrics/metrics.h"

namespace rekindle::coordinator {

// Reads the metrics of the fleet from the core of a coordinator that leads. No label names a node,
// a model or an instance, so the number of series does not grow with the fleet.
void read_fleet(const Core& core, TimePoint now, metrics::Readings& readings);

}  // namespace rekindle::coordinator
