#include "recovery/planner/name_pattern.h"

#include <algorithm>
#include <charconv>

namespace rekindle::planner {

namespace {

constexpr std::size_t kMaxPatternBytes = 512;
constexpr std::size_t kMaxParts = 32;
// Bounds the backtracking.
constexpr std::ptrdiff_t kMaxWildcards = 3;
// Per name. A sane pattern takes tens of steps.
constexpr int kMaxSteps = 20'000;

}  // namespace

Result<Pattern> Pattern::parse(std::string_view text) {
  if (text.empty() || text.size() > kMaxPatternBytes) {
    return fail(ErrorCode::kInvalid, "a pattern has 1 to {} characters, this one {}",
                kMaxPatternBytes, text.size());
  }
  Pattern pattern;
  pattern.text_ = text;
  while (!text.empty()) {
    if (text.front() == '{') {
      const auto close = text.find('}');
      if (close == std::string_view::npos) {
        return fail(ErrorCode::kInvalid, "pattern '{}' has a '{{' without '}}'", pattern.text_);
      }
      TRY_VOID(pattern.parse_braces(text.substr(1, close - 1)));
      text.remove_prefix(close + 1);
    } else if (text.starts_with("**")) {
      pattern.parts_.push_back({Token::kAny, {}});
      text.remove_prefix(2);
    } else if (text.front() == '*') {
      pattern.parts_.push_back({Token::kWord, {}});
      text.remove_prefix(1);
    } else {
      const auto end = std::min(text.find_first_of("*{"), text.size());
      pattern.parts_.push_back({Token::kText, {std::string(text.substr(0, end))}});
      text.remove_prefix(end);
    }
  }
  const auto wildcards = std::count_if(
      pattern.parts_.begin(), pattern.parts_.end(),
      [](const Part& part) { return part.token == Token::kWord || part.token == Token::kAny; });
  if (pattern.parts_.size() > kMaxParts || wildcards > kMaxWildcards) {
    return fail(ErrorCode::kInvalid, "pattern '{}' is too complex: at most {} parts and {} stars",
                pattern.text_, kMaxParts, kMaxWildcards);
  }
  return pattern;
}

Result<void> Pattern::parse_braces(std::string_view inside) {
  if (inside == "layer" || inside == "expert") {
    bool& seen = inside == "layer" ? has_layer_ : has_expert_;
    if (seen) {
      return fail(ErrorCode::kInvalid, "pattern '{}' has {{{}}} twice", text_, inside);
    }
    seen = true;
    parts_.push_back({inside == "layer" ? Token::kLayer : Token::kExpert, {}});
    return {};
  }
  if (inside == "n") {
    parts_.push_back({Token::kNumber, {}});
    return {};
  }
  if (inside.find('|') == std::string_view::npos || inside.find_first_of("*{") < inside.size()) {
    return fail(ErrorCode::kInvalid,
                "pattern '{}': '{{{}}}' is neither {{layer}}, {{expert}}, {{n}} nor {{a|b}}", text_,
                inside);
  }
  Part choice{Token::kChoice, {}};
  while (true) {
    const auto bar = inside.find('|');
    choice.texts.emplace_back(inside.substr(0, bar));
    if (bar == std::string_view::npos) break;
    inside.remove_prefix(bar + 1);
  }
  parts_.push_back(std::move(choice));
  return {};
}

std::optional<Pattern::Match> Pattern::match(std::string_view name) const {
  // The end of the name mostly decides, and cheaply.
  if (parts_.back().token == Token::kText && !name.ends_with(parts_.back().texts[0])) {
    return std::nullopt;
  }
  Match found;
  int budget = kMaxSteps;
  if (!match_from(0, name, found, budget)) return std::nullopt;
  return found;
}

bool Pattern::match_from(std::size_t part, std::string_view rest, Match& found, int& budget) const {
  if (part == parts_.size()) return rest.empty();
  if (--budget < 0) return false;
  const Part& here = parts_[part];
  switch (here.token) {
    case Token::kText:
    case Token::kChoice:
      return std::any_of(here.texts.begin(), here.texts.end(), [&](const std::string& text) {
        return rest.starts_with(text) &&
               match_from(part + 1, rest.substr(text.size()), found, budget);
      });
    case Token::kNumber:
    case Token::kLayer:
    case Token::kExpert:
      return match_number(part, rest, found, budget);
    case Token::kWord:
    case Token::kAny:
      return match_wildcard(part, rest, found, budget);
  }
  return false;
}

bool Pattern::match_number(std::size_t part, std::string_view rest, Match& found,
                           int& budget) const {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (error != std::errc()) return false;
  const auto digits = static_cast<std::size_t>(end - rest.data());
  if (digits > 1 && rest.front() == '0') return false;  // "007" is no index
  if (!match_from(part + 1, rest.substr(digits), found, budget)) return false;
  if (parts_[part].token == Token::kLayer) found.layer = value;
  if (parts_[part].token == Token::kExpert) found.expert = value;
  return true;
}

bool Pattern::match_wildcard(std::size_t part, std::string_view rest, Match& found,
                             int& budget) const {
  std::size_t longest = rest.size();
  if (parts_[part].token == Token::kWord) longest = std::min(rest.find('.'), longest);
  for (std::size_t taken = 1; taken <= longest; ++taken) {
    if (match_from(part + 1, rest.substr(taken), found, budget)) return true;
  }
  return false;
}

}  // namespace rekindle::planner
