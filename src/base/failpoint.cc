#include "src/base/failpoint.h"

#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <signal.h>
#include <unistd.h>

namespace rekindle {

namespace {

enum class Action { kKill, kError, kSleep, kHold };

struct Armed {
  Action action = Action::kKill;
  int error_number = 0;
  std::uint64_t sleep_ms = 0;
  std::uint64_t only_hit = 0;  // 0: every one
  std::uint64_t hits = 0;
};

using Table = std::map<std::string, Armed, std::less<>>;

std::atomic<bool> g_any_armed = false;
std::atomic<std::uint64_t> g_armings = 0;  // changes under g_mutex
std::mutex g_mutex;

Table& table() {  // guarded by g_mutex
  static Table instance;
  return instance;
}

std::optional<std::uint64_t> parse_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<Armed> parse_action(std::string_view text) {
  Armed armed;
  if (const auto at = text.find('@'); at != std::string_view::npos) {
    const auto hit = parse_number(text.substr(at + 1));
    if (!hit || *hit == 0) return std::nullopt;
    armed.only_hit = *hit;
    text = text.substr(0, at);
  }
  if (text == "kill") return armed;
  if (text == "error:ENOSPC" || text == "error:EIO") {
    armed.action = Action::kError;
    armed.error_number = text.ends_with("EIO") ? EIO : ENOSPC;
    return armed;
  }
  if (text == "hold") {
    armed.action = Action::kHold;
    return armed;
  }
  constexpr std::string_view kSleep = "sleep:";
  if (text.starts_with(kSleep)) {
    const auto sleep_ms = parse_number(text.substr(kSleep.size()));
    if (!sleep_ms) return std::nullopt;
    armed.action = Action::kSleep;
    armed.sleep_ms = *sleep_ms;
    return armed;
  }
  return std::nullopt;
}

}  // namespace

Result<void> arm_failpoints(std::string_view spec) {
  Table parsed;
  while (!spec.empty()) {
    const auto end = spec.find(';');
    const auto item = spec.substr(0, end);
    spec = end == std::string_view::npos ? "" : spec.substr(end + 1);
    const auto equals = item.find('=');
    const auto armed = equals == std::string_view::npos || equals == 0
                           ? std::nullopt
                           : parse_action(item.substr(equals + 1));
    if (!armed) {
      return fail(ErrorCode::kInvalid,
                  "failpoint '{}' is not NAME=ACTION[@HIT] with kill, error:ENOSPC, error:EIO, "
                  "sleep:MILLISECONDS or hold",
                  item);
    }
    parsed.insert_or_assign(std::string(item.substr(0, equals)), *armed);
  }
  const std::lock_guard lock(g_mutex);
  g_any_armed = !parsed.empty();
  table() = std::move(parsed);
  ++g_armings;
  g_armings.notify_all();
  return {};
}

namespace failpoint_detail {

bool any_armed() { return g_any_armed.load(std::memory_order_relaxed); }

Result<void> pass(std::string_view name) {
  Armed armed;
  std::uint64_t armings = 0;
  {
    const std::lock_guard lock(g_mutex);
    armings = g_armings;
    const auto at = table().find(name);
    if (at == table().end()) return {};
    ++at->second.hits;
    armed = at->second;
  }
  if (armed.only_hit != 0 && armed.hits != armed.only_hit) return {};
  switch (armed.action) {
    case Action::kKill:
      ::kill(::getpid(), SIGKILL);
      ::pause();
      break;
    case Action::kError:
      return fail_errno(armed.error_number, fmt::format("failpoint {}", name));
    case Action::kSleep:
      std::this_thread::sleep_for(std::chrono::milliseconds(armed.sleep_ms));
      break;
    case Action::kHold:
      g_armings.wait(armings);
      break;
  }
  return {};
}

}  // namespace failpoint_detail

}  // namespace rekindle
