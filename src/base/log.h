#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "src/base/result.h"

// Structured logs: an event name and key=value pairs, to stderr. Never log keys, tokens or secrets.
//   log::info("pull.start", "model", mv.to_string(), "bytes", bytes);
namespace rekindle::log {

enum class Level { kTrace, kDebug, kInfo, kWarn, kError, kOff };
enum class Format { kText, kJson };

Result<Level> parse_level(std::string_view text);
void init(Level level, Format format);  // once, from main; before it, only warnings are written
void set_level(Level level);            // any thread
bool enabled(Level level);
// fields: alternating key and value, already rendered. Any thread.
void write(Level level, std::string_view event,
           std::initializer_list<std::pair<std::string_view, std::string>> fields);

namespace detail {
template <typename T>
std::string render(const T& value) {
  return fmt::format("{}", value);
}
inline std::string render(const Error& error) { return error.message(); }

template <typename... Fields>
void emit(Level level, std::string_view event, const Fields&... fields) {
  static_assert(sizeof...(fields) % 2 == 0, "fields come as key, value pairs");
  if (!enabled(level)) return;
  [&]<std::size_t... I>(std::index_sequence<I...>, const auto& tuple) {
    write(level, event,
          {std::pair<std::string_view, std::string>(std::get<2 * I>(tuple),
                                                    render(std::get<2 * I + 1>(tuple)))...});
  }
  (std::make_index_sequence<sizeof...(fields) / 2>(), std::forward_as_tuple(fields...));
}
}  // namespace detail

template <typename... Fields>
void debug(std::string_view event, const Fields&... fields) {
  detail::emit(Level::kDebug, event, fields...);
}
template <typename... Fields>
void info(std::string_view event, const Fields&... fields) {
  detail::emit(Level::kInfo, event, fields...);
}
template <typename... Fields>
void warn(std::string_view event, const Fields&... fields) {
  detail::emit(Level::kWarn, event, fields...);
}
template <typename... Fields>
void error(std::string_view event, const Fields&... fields) {
  detail::emit(Level::kError, event, fields...);
}

}  // namespace rekindle::log
