#include "recovery/planner/model_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "src/base/strict_json.h"
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

Result<ModelConfig> ModelConfig::parse(std::string_view text) {
  ModelConfig config;
  TRY(config.json_, parse_strict_json(text, "config.json", kMaxConfigBytes, kMaxConfigDepth));
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

}  // namespace rekindle::planner
