#include "src/base/version.h"

namespace rekindle {

std::string_view version() { return REKINDLE_VERSION; }
std::string_view software_version() { return "rekindle " REKINDLE_VERSION; }

}  // namespace rekindle
