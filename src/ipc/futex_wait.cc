#include "src/ipc/futex_wait.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace rekindle::ipc {

namespace {

// From linux/futex.h and asm/unistd.h of Linux 5.16, because the headers of a build may be older.
constexpr long kSysFutexWaitv = 449;
constexpr std::size_t kMaxWords = 128;
constexpr std::uint32_t kSize32 = 2;
struct WaitEntry {
  std::uint64_t value;
  std::uint64_t address;
  std::uint32_t flags;
  std::uint32_t reserved;
};

WaitEntry entry_of(FutexWord word, std::uint32_t flags) {
  return {word.value, reinterpret_cast<std::uintptr_t>(word.word), kSize32 | flags, 0};
}

timespec to_timespec(Duration duration) {
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(duration);
  return {static_cast<time_t>(whole.count()), static_cast<long>((duration - whole).count())};
}

FutexWake wake_of(long result, int error_number) {
  if (result >= 0 || error_number == EINTR) return FutexWake::kWoken;
  return error_number == ETIMEDOUT ? FutexWake::kTimeout : FutexWake::kChanged;
}

}  // namespace

FutexWake FutexWaiter::wait(FutexWord own, std::span<const FutexWord> shared, TimePoint deadline) {
  static_assert(std::chrono::steady_clock::period::den == 1'000'000'000);
  if (have_waitv_ && !shared.empty()) {
    std::array<WaitEntry, kMaxWords> entries{};
    entries[0] = entry_of(own, FUTEX_PRIVATE_FLAG);
    const std::size_t count = std::min(shared.size(), kMaxWords - 1);
    for (std::size_t i = 0; i < count; ++i) entries[i + 1] = entry_of(shared[i], 0);
    const timespec until = to_timespec(deadline.time_since_epoch());
    const long result =
        ::syscall(kSysFutexWaitv, entries.data(), count + 1, 0, &until, CLOCK_MONOTONIC);
    if (result >= 0 || errno == ETIMEDOUT || errno == EINTR || errno == EAGAIN) {
      return wake_of(result, errno);
    }
    // ENOSYS, or a seccomp filter that does not know the call.
    have_waitv_ = false;
  }
  const timespec left = to_timespec(std::max(Duration(0), deadline - SteadyClock().now()));
  const long result =
      ::syscall(SYS_futex, own.word, FUTEX_WAIT_PRIVATE, own.value, &left, nullptr, 0);
  return wake_of(result, errno);
}

void futex_wake_own(std::uint32_t* own) {
  ::syscall(SYS_futex, own, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace rekindle::ipc
