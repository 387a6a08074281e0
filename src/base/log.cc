#include "src/base/log.h"

#include <algorithm>
#include <memory>

#include <nlohmann/json.hpp>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace rekindle::log {

namespace {

Format g_format = Format::kText;  // set once by init, before threads start

spdlog::logger& logger() {
  static const auto instance = [] {
    auto created = std::make_shared<spdlog::logger>(
        "rekindle", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    created->set_level(spdlog::level::warn);
    created->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %v", spdlog::pattern_time_type::utc);
    return created;
  }();
  return *instance;
}

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::kTrace:
      return spdlog::level::trace;
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarn:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
    case Level::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

bool needs_quotes(std::string_view value) {
  // Includes control characters: values come from peers and must not drive a terminal.
  return std::any_of(value.begin(), value.end(),
                     [](char c) {
                       return (c >= 0 && c <= ' ') || c == '=' || c == '"' || c == '\\' ||
                              c == 0x7f;
                     }) ||
         value.empty();
}

}  // namespace

Result<Level> parse_level(std::string_view text) {
  if (text == "trace") return Level::kTrace;
  if (text == "debug") return Level::kDebug;
  if (text == "info") return Level::kInfo;
  if (text == "warn") return Level::kWarn;
  if (text == "error") return Level::kError;
  if (text == "off") return Level::kOff;
  return fail(ErrorCode::kInvalid,
              "'{}' is not a log level; use trace, debug, info, warn, error or off", text);
}

void init(Level level, Format format) {
  g_format = format;
  logger().set_level(to_spdlog(level));
  if (format == Format::kJson) logger().set_pattern("%v");
}

void set_level(Level level) { logger().set_level(to_spdlog(level)); }

bool enabled(Level level) { return logger().should_log(to_spdlog(level)); }

void write(Level level, std::string_view event,
           std::initializer_list<std::pair<std::string_view, std::string>> fields) {
  std::string line;
  if (g_format == Format::kJson) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    line = fmt::format(R"({{"ts":{:.3f},"level":"{}","event":{})",
                       std::chrono::duration<double>(now).count(),
                       spdlog::level::to_string_view(to_spdlog(level)), json_string(event));
    for (const auto& [key, value] : fields) {
      line += fmt::format(",{}:{}", json_string(key), json_string(value));
    }
    line += '}';
  } else {
    line = event;
    for (const auto& [key, value] : fields) {
      line += fmt::format(" {}={}", key, needs_quotes(value) ? json_string(value) : value);
    }
  }
  logger().log(to_spdlog(level), line);
}

}  // namespace rekindle::log
