#pragma once

#include <string>
#include <vector>

#include "tests/scale/scenarios.h"

namespace rekindle::scale {

// One panel for each report: how many of the awaited hosts are ready, over time, and when the
// network alone would have them ready. An SVG document.
std::string plot(const std::vector<Report>& reports);

}  // namespace rekindle::scale
