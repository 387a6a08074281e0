#include "src/ipc/life_signs.h"

#include <array>
#include <atomic>
#include <string>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <unistd.h>

namespace rekindle::ipc {

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
