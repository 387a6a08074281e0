#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "src/base/result.h"

namespace rekindle::planner {

// The message on one line of bounded length. Names and patterns in it come from files and users.
Error one_line(const Error& error);
template <typename T>
Result<T> one_line(Result<T> result) {
  if (!result) return fail(one_line(std::move(result).error()));
  return result;
}

// A number in a rule: written out, or the first of these keys of config.json that is there
// ("a|b.c": keys separated by '|', levels by '.').
struct ConfigValue {
  std::uint64_t literal = 0;
  // Empty: a literal.
  std::vector<std::string> keys;
};

// A model's config.json.
class ModelConfig {
 public:
  static Result<ModelConfig> parse(std::string_view text);

  // kInvalid: no key is there, or its value is not a positive integer.
  Result<std::uint64_t> number(const ConfigValue& value) const;
  // A list of positive integers at `key`.
  Result<std::vector<std::uint64_t>> numbers(const std::string& key) const;
  // False when it is not there.
  bool flag(const char* key) const;
  // "" when it is not there.
  std::string text(const char* key) const;

 private:
  const nlohmann::json* find(std::string_view key) const;
  nlohmann::json json_;
};

}  // namespace rekindle::planner
