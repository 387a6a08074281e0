#include "transport/shm/source_mappings.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "src/base/units.h"
#include "src/base/worker_pool.h"

namespace rekindle::transport::shm {

std::shared_ptr<const Mapping> Mapping::create(const UniqueFd& fd, const RegionReply& reply) {
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0) return nullptr;
  if (!in_range(reply.fd_offset, reply.size_bytes, static_cast<std::uint64_t>(info.st_size))) {
    return nullptr;
  }
  const std::uint64_t before = reply.fd_offset % kPageBytes;
  const std::size_t length = reply.size_bytes + before;
  if (length == 0) return nullptr;
  void* base = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, fd.get(),
                      static_cast<off_t>(reply.fd_offset - before));
  if (base == MAP_FAILED) return nullptr;
  const auto* first = static_cast<const std::byte*>(base) + before;
  return std::shared_ptr<const Mapping>(
      new Mapping(base, length, {first, static_cast<std::size_t>(reply.size_bytes)}));
}

Mapping::~Mapping() { ::munmap(base_, length_); }

namespace {

int milliseconds_until(TimePoint time) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(time - steady_now()).count();
  return static_cast<int>(std::max<std::int64_t>(left, 0));
}

}  // namespace

SourceMappings::~SourceMappings() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  if (!thread_.joinable()) return;
  wake();
  thread_.join();
}

std::shared_ptr<const Mapping> SourceMappings::open(const UniqueFd& fd, const RegionReply& reply) {
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0) return nullptr;
  const Key key{info.st_dev, info.st_ino, reply.fd_offset, reply.size_bytes};
  const TimePoint until = steady_now() + kept_for_;
  const std::lock_guard lock(mutex_);
  if (thread_.joinable()) {
    drop_nameless();
    if (!doomed_.empty()) wake();
  }
  const auto known = kept_.find(key);
  if (known != kept_.end() && info.st_nlink > 0 &&
      in_range(reply.fd_offset, reply.size_bytes, static_cast<std::uint64_t>(info.st_size))) {
    known->second.until = until;
    return known->second.mapping;
  }
  auto mapping = Mapping::create(fd, reply);
  if (mapping == nullptr || !start()) return mapping;
  // By descriptor, because this process need not reach the path. IN_ATTRIB: a name goes.
  const std::string opened = fmt::format("/proc/self/fd/{}", fd.get());
  const int watch = ::inotify_add_watch(inotify_.get(), opened.c_str(), IN_ATTRIB);
  // The last name may have gone before the watch began.
  if (watch >= 0 && ::fstat(fd.get(), &info) == 0 && info.st_nlink > 0) {
    kept_.insert_or_assign(key, Kept{mapping, watch, until});
    wake();
  } else if (watch >= 0) {
    unwatch(watch);
  }
  return mapping;
}

std::size_t SourceMappings::size() const {
  const std::lock_guard lock(mutex_);
  return kept_.size();
}

// False: the kernel has no more instances of inotify for this user, so nothing is kept.
bool SourceMappings::start() {
  if (thread_.joinable()) return true;
  inotify_ = UniqueFd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  wake_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!inotify_ || !wake_) return false;
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
  return true;
}

void SourceMappings::wake() {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

void SourceMappings::run() {
  set_thread_name("rk-shm-keep");
  while (true) {
    std::optional<TimePoint> next;
    std::vector<std::shared_ptr<const Mapping>> doomed;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      drop_nameless();
      next = drop_old(steady_now());
      doomed.swap(doomed_);
    }
    doomed.clear();
    const int wait_ms = next ? milliseconds_until(*next) : -1;
    std::array<pollfd, 2> fds{{{inotify_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}}};
    (void)::poll(fds.data(), fds.size(), wait_ms);
    std::uint64_t count = 0;
    (void)!::read(wake_.get(), &count, sizeof count);
  }
}

void SourceMappings::drop_nameless() {
  alignas(inotify_event) std::array<char, 4096> events{};
  while (true) {
    const ssize_t size = ::read(inotify_.get(), events.data(), events.size());
    if (size <= 0) return;
    for (ssize_t at = 0; at < size;) {
      inotify_event event{};
      std::memcpy(&event, events.data() + at, sizeof event);
      at += static_cast<ssize_t>(sizeof event + event.len);
      const int watch = event.wd;
      const bool lost = (event.mask & IN_Q_OVERFLOW) != 0;
      drop_if([&](const Kept& kept) { return lost || kept.watch == watch; });
    }
  }
}

// Returns when to look next.
std::optional<TimePoint> SourceMappings::drop_old(TimePoint now) {
  std::optional<TimePoint> next;
  for (auto& [key, kept] : kept_) {
    if (kept.mapping.use_count() > 1) kept.until = now + kept_for_;
  }
  drop_if([&](const Kept& kept) { return kept.until <= now; });
  for (const auto& [key, kept] : kept_) next = std::min(next.value_or(kept.until), kept.until);
  return next;
}

void SourceMappings::drop_if(const std::function<bool(const Kept&)>& goes) {
  std::set<int> watches;
  std::erase_if(kept_, [&](const auto& item) {
    if (!goes(item.second)) return false;
    watches.insert(item.second.watch);
    doomed_.push_back(item.second.mapping);
    return true;
  });
  for (const int watch : watches) unwatch(watch);
}

// Regions of one file share its watch.
void SourceMappings::unwatch(int watch) {
  const bool shared =
      std::ranges::any_of(kept_, [&](const auto& item) { return item.second.watch == watch; });
  if (!shared) (void)::inotify_rm_watch(inotify_.get(), watch);
}

}  // namespace rekindle::transport::shm
