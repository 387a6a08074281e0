#pragma once

#include <cstddef>
#include <string_view>

#include <nlohmann/json.hpp>

#include "src/base/result.h"

namespace rekindle {

// Refuses with kInvalid more than `max_bytes`, deeper nesting than `max_depth`, and duplicate keys,
// of which other parsers take the last. `what` begins the error: "shard spec".
Result<nlohmann::json> parse_strict_json(std::string_view text, std::string_view what,
                                         std::size_t max_bytes, int max_depth);

}  // namespace rekindle
