#include "src/base/strict_json.h"

#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace rekindle {

using nlohmann::json;

Result<json> parse_strict_json(std::string_view text, std::string_view what, std::size_t max_bytes,
                               int max_depth) {
  if (text.size() > max_bytes) {
    return fail(ErrorCode::kInvalid, "{}: {} bytes, the most accepted is {}", what, text.size(),
                max_bytes);
  }
  std::string wrong;
  // Of the open objects.
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > max_depth && wrong.empty()) wrong = fmt::format("nested deeper than {}", max_depth);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    if (event == json::parse_event_t::key && wrong.empty() && !keys.empty() &&
        !keys.back().insert(parsed.get<std::string>()).second) {
      wrong = fmt::format("key {} appears twice", parsed.dump());
    }
    return wrong.empty();
  };
  json parsed;
  try {
    parsed = json::parse(text, check);
  } catch (const json::exception& error) {
    return fail(ErrorCode::kInvalid, "{}: {}", what, error.what());
  }
  if (!wrong.empty()) return fail(ErrorCode::kInvalid, "{}: {}", what, wrong);
  return parsed;
}

}  // namespace rekindle
