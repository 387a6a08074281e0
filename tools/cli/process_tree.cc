#include "tools/cli/process_tree.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <string>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fmt/format.h>

#include "src/base/clock.h"
#include "src/ipc/channel.h"

namespace rekindle::cli {
namespace {

// More generations than any program has.
constexpr int kMostParents = 128;

UniqueFd hold(pid_t pid) { return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }

// 0: the process is gone, or the first one.
pid_t parent_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text)) return 0;
  // The name of the program may contain anything: proc(5).
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 4 >= text.size()) return 0;
  pid_t parent = 0;
  (void)std::from_chars(text.data() + name_end + 4, text.data() + text.size(), parent);
  return parent;
}

}  // namespace

bool HeldProcess::has_ended() const {
  pollfd entry{pidfd.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

void HeldProcess::signal(int number) const {
  (void)::syscall(SYS_pidfd_send_signal, pidfd.get(), number, nullptr, 0);
}

bool has_ended(pid_t pid) {
  const HeldProcess held{pid, hold(pid)};
  return held.pidfd ? held.has_ended() : errno == ESRCH;
}

bool is_below(pid_t pid, pid_t ancestor) {
  for (int step = 0; step < kMostParents && pid > 1; ++step) {
    pid = parent_of(pid);
    if (pid == ancestor) return true;
  }
  return false;
}

HeldProcess hold_below(pid_t pid, pid_t ancestor) {
  HeldProcess held{pid, hold(pid)};
  // The number may have passed to another process before it was looked up in /proc.
  if (held.pidfd && (!is_below(pid, ancestor) || held.has_ended())) held.pidfd.reset();
  return held;
}

std::span<const HeldProcess> hold_all_below(pid_t ancestor, std::vector<HeldProcess>& held) {
  const std::size_t before = held.size();
  std::error_code error;
  const std::filesystem::directory_iterator processes("/proc", error);
  for (auto at = begin(processes); !error && at != end(processes); at.increment(error)) {
    const std::string name = at->path().filename().string();
    pid_t pid = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ec != std::errc() || parsed.ptr != name.data() + name.size()) continue;
    const bool known = std::ranges::any_of(
        held, [&](const HeldProcess& one) { return one.pid == pid && !one.has_ended(); });
    if (known || !is_below(pid, ancestor)) continue;
    HeldProcess found = hold_below(pid, ancestor);
    if (found.pidfd) held.push_back(std::move(found));
  }
  return std::span(held).subspan(before);
}

std::size_t wait_for_ends(std::span<const HeldProcess> held, std::chrono::milliseconds patience) {
  const TimePoint give_up = steady_now() + patience;
  std::size_t left = 0;
  for (const HeldProcess& one : held) {
    pollfd entry{one.pidfd.get(), POLLIN, 0};
    if (::poll(&entry, 1, ipc::poll_timeout_ms(steady_now(), give_up)) <= 0) ++left;
  }
  return left;
}

}  // namespace rekindle::cli
