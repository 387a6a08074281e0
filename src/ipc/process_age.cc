#include "src/ipc/process_age.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>

#include <unistd.h>

#include <fmt/format.h>
#include <time.h>

namespace rekindle::ipc {

std::optional<Duration> age_of_process(std::string_view stat, Duration since_boot,
                                       long ticks_per_second) {
  // The name of the program, in parentheses, may contain spaces and parentheses. The start is the
  // twentieth word after it.
  constexpr int kWordsBefore = 19;
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string_view::npos || ticks_per_second <= 0) return std::nullopt;
  std::istringstream words{std::string(stat.substr(name_end + 1))};
  std::string skipped;
  for (int i = 0; i < kWordsBefore; ++i) words >> skipped;
  std::int64_t ticks = 0;
  if (!(words >> ticks)) return std::nullopt;
  const Duration tick = Duration(std::chrono::seconds(1)) / ticks_per_second;
  return std::max(since_boot - ticks * tick, Duration::zero());
}

std::optional<Duration> age_of_process(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  timespec now{};
  if (!std::getline(file, text) || ::clock_gettime(CLOCK_BOOTTIME, &now) != 0) return std::nullopt;
  const Duration since_boot =
      std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  return age_of_process(text, since_boot, ::sysconf(_SC_CLK_TCK));
}

std::optional<pid_t> pid_of(int pidfd) {
  std::ifstream info(fmt::format("/proc/self/fdinfo/{}", pidfd));
  for (std::string name; info >> name;) {
    pid_t pid = 0;
    if (name == "Pid:" && info >> pid) return pid;
  }
  return std::nullopt;
}

}  // namespace rekindle::ipc
