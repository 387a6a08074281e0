#pragma once

#include <string_view>

namespace rekindle {

std::string_view version();           // "0.1.0", of CMakeLists.txt
std::string_view software_version();  // "rekindle 0.1.0"

}  // namespace rekindle
