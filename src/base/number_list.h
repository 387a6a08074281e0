#pragma once

#include <string_view>
#include <vector>

namespace rekindle {

// "0-3,8", as sysfs lists CPUs and NUMA nodes, in the order of the text. Empty when it is anything
// else, or a number is `limit` or more.
std::vector<int> parse_number_list(std::string_view text, int limit);

}  // namespace rekindle
