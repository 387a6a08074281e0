#include "recovery/planner/shard_rule.h"

#include <algorithm>
#include <charconv>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "src/tensor/canonical.h"

namespace rekindle::planner {

namespace {

using nlohmann::json;

constexpr std::size_t kMaxConfigBytes = 16 << 20;
constexpr int kMaxConfigDepth = 64;
constexpr std::uint64_t kMaxNumber = std::uint64_t{1} << 40;

Result<std::uint64_t> positive(const json& value, std::string_view key) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() == 0 ||
      value.get<std::uint64_t>() > kMaxNumber) {
    return fail(ErrorCode::kInvalid, "config.json: '{}' is no positive integer", key);
  }
  return value.get<std::uint64_t>();
}

}  // namespace

Error one_line(const Error& error) {
  constexpr std::size_t kMaxMessageBytes = 2000;
  std::string text = error.message().substr(0, kMaxMessageBytes);
  while (text.size() < error.message().size() && (text.back() & 0xC0) == 0x80) text.pop_back();
  const bool utf8 = canonical::is_utf8(text);
  for (char& c : text) {
    const auto byte = static_cast<std::uint8_t>(c);
    if (byte < 0x20 || byte == 0x7F || (byte >= 0x80 && !utf8)) c = '?';
  }
  return {error.code(), std::move(text)};
}

Result<json> parse_json(std::string_view text, std::string_view what, std::size_t max_bytes,
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

Result<ModelConfig> ModelConfig::parse(std::string_view text) {
  ModelConfig config;
  TRY(config.json_, parse_json(text, "config.json", kMaxConfigBytes, kMaxConfigDepth));
  if (!config.json_.is_object()) {
    return fail(ErrorCode::kInvalid, "config.json: not a JSON object");
  }
  return config;
}

const json* ModelConfig::find(std::string_view key) const {
  const json* at = &json_;
  while (true) {
    const auto dot = key.find('.');
    if (!at->is_object()) return nullptr;
    const auto found = at->find(std::string(key.substr(0, dot)));
    if (found == at->end() || found->is_null()) return nullptr;
    at = &*found;
    if (dot == std::string_view::npos) return at;
    key.remove_prefix(dot + 1);
  }
}

Result<std::uint64_t> ModelConfig::number(const ConfigValue& value) const {
  if (value.keys.empty()) return value.literal;
  for (const std::string& key : value.keys) {
    if (const json* found = find(key)) return positive(*found, key);
  }
  return fail(ErrorCode::kInvalid, "config.json lacks '{}'", fmt::join(value.keys, "' and '"));
}

Result<std::vector<std::uint64_t>> ModelConfig::numbers(const std::string& key) const {
  const json* found = find(key);
  if (found == nullptr) return fail(ErrorCode::kInvalid, "config.json lacks '{}'", key);
  if (!found->is_array()) {
    return fail(ErrorCode::kInvalid, "config.json: '{}' is no list of positive integers", key);
  }
  std::vector<std::uint64_t> values;
  for (const json& one : *found) {
    TRY(const std::uint64_t number, positive(one, key));
    values.push_back(number);
  }
  return values;
}

bool ModelConfig::flag(const char* key) const {
  const json* found = find(key);
  return found != nullptr && found->is_boolean() && found->get<bool>();
}

std::string ModelConfig::text(const char* key) const {
  const json* found = find(key);
  return found != nullptr && found->is_string() ? found->get<std::string>() : std::string();
}

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
