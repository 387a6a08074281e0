#include "src/base/glob.h"

#include <algorithm>

#include <fnmatch.h>

namespace rekindle {

bool matches_glob(const std::string& glob, const std::string& text) {
  return text.find('\0') == std::string::npos && ::fnmatch(glob.c_str(), text.c_str(), 0) == 0;
}

// fnmatch() takes a bracket without its end as a plain character.
Result<void> check_glob(const std::string& glob) {
  if (glob.empty()) return fail(ErrorCode::kInvalid, "it is empty; `*` matches everything");
  for (std::size_t i = 0; i < glob.size(); ++i) {
    if (static_cast<unsigned char>(glob[i]) < ' ') {
      return fail(ErrorCode::kInvalid, "it has a control character");
    }
    if (glob[i] == '\\' && ++i == glob.size()) {
      return fail(ErrorCode::kInvalid, "nothing follows its last backslash");
    }
    if (glob[i] == '[' && (i == 0 || glob[i - 1] != '\\')) {
      const std::size_t end = glob.find(']', i + 2);
      if (end == std::string::npos) return fail(ErrorCode::kInvalid, "a [ has no ]");
      i = end;
    }
  }
  return {};
}

Result<void> check_model_glob(const std::string& glob) {
  TRY_VOID(check_glob(glob));
  const auto may_be = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("._/+-*?[]!^").find(c) != std::string_view::npos;
  };
  if (std::ranges::all_of(glob, may_be)) return {};
  return fail(ErrorCode::kInvalid, "it has a character that no name of a model has");
}

}  // namespace rekindle
