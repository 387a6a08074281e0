#pragma once

#include <string>
#include <string_view>

#include "src/base/result.h"

namespace rekindle {

// Whether the whole text matches, as fnmatch(3) without flags says. A text with a zero byte matches
// nothing: fnmatch() would see only its first part.
bool matches_glob(const std::string& glob, const std::string& text);

// kInvalid: fnmatch() would not read the pattern as its author meant it. It takes a bracket without
// its end as a plain character.
Result<void> check_glob(std::string_view glob);

// The same, and kInvalid for a pattern with a character that no name of a model may have, because
// it would silently match none.
Result<void> check_model_glob(std::string_view glob);

}  // namespace rekindle
