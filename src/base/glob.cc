#include "src/base/glob.h"

#include <cstddef>

#include <fnmatch.h>

namespace rekindle {

namespace {

// The place of the ] that ends the bracket at `begin`, or npos. A ] that comes first stands for
// itself.
std::size_t end_of_bracket(std::string_view glob, std::size_t begin) {
  std::size_t i = begin + 1;
  if (i < glob.size() && (glob[i] == '!' || glob[i] == '^')) ++i;
  if (i < glob.size() && glob[i] == ']') ++i;
  for (; i < glob.size(); ++i) {
    if (glob[i] == ']') return i;
    if (glob[i] == '\\') ++i;
    if (glob.substr(i).starts_with("[:")) {
      const std::size_t end = glob.find(":]", i + 2);
      if (end == std::string_view::npos) return end;
      i = end + 1;
    }
  }
  return std::string_view::npos;
}

bool is_of_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("._/+-").find(c) != std::string_view::npos;
}

}  // namespace

bool matches_glob(const std::string& glob, const std::string& text) {
  return text.find('\0') == std::string::npos && ::fnmatch(glob.c_str(), text.c_str(), 0) == 0;
}

Result<void> check_glob(std::string_view glob) {
  if (glob.empty()) return fail(ErrorCode::kInvalid, "it is empty; `*` matches everything");
  for (std::size_t i = 0; i < glob.size(); ++i) {
    if (static_cast<unsigned char>(glob[i]) < ' ') {
      return fail(ErrorCode::kInvalid, "it has a control character");
    }
    if (glob[i] == '\\' && ++i == glob.size()) {
      return fail(ErrorCode::kInvalid, "nothing follows its last backslash");
    }
    if (glob[i] == '[' && (i == 0 || glob[i - 1] != '\\')) {
      i = end_of_bracket(glob, i);
      if (i == std::string_view::npos) return fail(ErrorCode::kInvalid, "a [ has no ]");
    }
  }
  return {};
}

Result<void> check_model_glob(std::string_view glob) {
  TRY_VOID(check_glob(glob));
  const auto bad = [](char c) {
    return fail(ErrorCode::kInvalid,
                "'{}' stands in no name of a model; use A-Z a-z 0-9 . _ / + - and the wildcards "
                "* ? [ ]",
                c);
  };
  std::size_t end = 0;  // of the bracket around i
  for (std::size_t i = 0; i < glob.size(); ++i) {
    const char c = glob[i];
    if (i < end) {
      if (!is_of_name(c) && std::string_view("!^[]:").find(c) == std::string_view::npos) {
        return bad(c);
      }
    } else if (c == '[') {
      end = end_of_bracket(glob, i);
    } else if (!(c == ']' && i == end && end > 0) && c != '*' && c != '?' && !is_of_name(c)) {
      return bad(c);
    }
  }
  return {};
}

}  // namespace rekindle
