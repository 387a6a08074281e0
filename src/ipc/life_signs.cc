#include "src/ipc/life_signs.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <string>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
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

namespace {

bool is_over(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

// Empty if /proc does not show the process. A process that is still alive after the file was opened
// had this number at that moment.
UniqueFd open_status(const Peer& peer) {
  if (peer.pid <= 0 || !peer.pidfd) return {};
  const std::string path = fmt::format("/proc/{}/status", peer.pid);
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd && is_over(peer.pidfd.get())) fd.reset();
  return fd;
}

}  // namespace

bool says_core_dumping(std::string_view status) {
  constexpr std::string_view kLine = "\nCoreDumping:\t1\n";
  return status.find(kLine) != std::string_view::npos;
}

LifeSigns::LifeSigns(std::uint64_t worker, std::unique_ptr<LifePage> page, Peer peer)
    : worker_(worker),
      page_(std::move(page)),
      status_(open_status(peer)),
      pidfd_(std::move(peer.pidfd)) {}

bool LifeSigns::owner_died() const {
  return (std::atomic_ref(*page_->word()).load() & FUTEX_OWNER_DIED) != 0;
}

bool LifeSigns::dumps_core() const {
  if (!status_) return false;
  std::array<char, 16384> text;
  const ssize_t got = ::pread(status_.get(), text.data(), text.size(), 0);
  return got > 0 && says_core_dumping({text.data(), static_cast<std::size_t>(got)});
}

bool LifeSigns::has_ended() const { return pidfd_ && is_over(pidfd_.get()); }

std::optional<DeathSign> LifeSigns::look() const {
  if (owner_died()) return DeathSign::kFutex;
  if (dumps_core()) return DeathSign::kCoreDump;
  if (!has_ended()) return std::nullopt;
  // The kernel marks the word first.
  return owner_died() ? DeathSign::kFutex : DeathSign::kPidfd;
}

FutexWord LifeSigns::watched_word() const {
  std::atomic_ref<std::uint32_t> word(*page_->word());
  std::uint32_t value = word.load();
  while ((value & FUTEX_TID_MASK) != 0 && (value & (FUTEX_WAITERS | FUTEX_OWNER_DIED)) == 0) {
    // The kernel wakes waiters only if the word has this bit.
    if (word.compare_exchange_weak(value, value | FUTEX_WAITERS)) value |= FUTEX_WAITERS;
  }
  return {page_->word(), value};
}

}  // namespace rekindle::ipc
