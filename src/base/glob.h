#pragma once

#include <string>

#include "src/base/result.h"

namespace rekindle {

// Whether the whole text matches, as fnmatch(3) without flags says. A text with a zero byte matches
// nothing: fnmatch() would see only its first part.
bool matches_glob(const std::string& glob, const std::string& text);

// kInvalid: fnmatch() takes it otherwise than its author meant.
Result<void> check_glob(const std::string& glob);
// kInvalid also if no model can match, because names have other characters.
Result<void> check_model_glob(const std::string& glob);

}  // namespace rekindle
