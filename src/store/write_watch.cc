#include "src/store/write_watch.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "src/base/duplicate_fd.h"
#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/store/segment_store.h"

namespace rekindle::store {

namespace {

constexpr std::uint32_t kEvents = IN_MODIFY | IN_CLOSE_WRITE;

}  // namespace

std::unique_ptr<WatchedFile> WriteWatch::add(int fd, const std::filesystem::path& path) {
  const std::lock_guard lock(mutex_);
  read_events();  // of a file that has the same number: they are older than this watch
  const auto number = start(fd);
  std::unique_ptr<WatchedFile> file(new WatchedFile(*this, number.value_or(-1)));
  if (number) {
    file->seen_.watched = true;
    files_.emplace(*number, file.get());
  } else if (!std::exchange(told_, true)) {
    log::warn("store.watch", "file", path.string(), "error", number.error(), "action",
              "copies are read again before their first use; raise "
              "fs.inotify.max_user_instances and fs.inotify.max_user_watches");
  }
  return file;
}

// By descriptor, because the file's name may have changed.
Result<int> WriteWatch::start(int fd) {
  TRY_VOID(failpoint("store.watch"));
  if (!inotify_) {
    inotify_ = UniqueFd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
    if (!inotify_) return fail_errno(errno, "inotify_init1");
  }
  const std::string opened = fmt::format("/proc/self/fd/{}", fd);
  const int number = ::inotify_add_watch(inotify_.get(), opened.c_str(), kEvents);
  if (number < 0) return fail_errno(errno, "inotify_add_watch");
  return number;
}

std::vector<WriteWatch::Seen> WriteWatch::seen(
    std::span<const std::unique_ptr<WatchedFile>> files) {
  const std::lock_guard lock(mutex_);
  read_events();
  std::vector<Seen> all;
  all.reserve(files.size());
  for (const auto& file : files) all.push_back(file->seen_);
  return all;
}

void WriteWatch::remove(WatchedFile& file) {
  const std::lock_guard lock(mutex_);
  if (file.number_ < 0) return;
  const auto [begin, end] = files_.equal_range(file.number_);
  for (auto at = begin; at != end; ++at) {
    if (at->second != &file) continue;
    files_.erase(at);
    break;
  }
  if (!files_.contains(file.number_)) ::inotify_rm_watch(inotify_.get(), file.number_);
}

void WriteWatch::read_events() {
  if (!inotify_) return;
  alignas(inotify_event) char buffer[4096];
  for (;;) {
    const ssize_t got = ::read(inotify_.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) return lose_all();
    for (ssize_t at = 0; at < got;) {
      inotify_event event;
      std::memcpy(&event, buffer + at, sizeof event);
      at += static_cast<ssize_t>(sizeof event + event.len);
      if ((event.mask & IN_Q_OVERFLOW) != 0) lose_all();
      const auto [begin, end] = files_.equal_range(event.wd);
      for (auto file = begin; file != end; ++file) file->second->note(event.mask);
    }
  }
}

// Events were lost: any of them may have been a write to any of the files.
void WriteWatch::lose_all() {
  for (const auto& [number, file] : files_) file->seen_.written = true;
}

WatchedFile::~WatchedFile() { watch_.remove(*this); }

void WatchedFile::note(std::uint32_t events) {
  if ((events & IN_CLOSE_WRITE) == 0) {
    seen_.written = true;  // or the watch has ended, and later writes are not seen
  } else if (own_closes_ > 0) {
    --own_closes_;
  } else {
    seen_.closed = true;
  }
}

// The kernel merges an event with an equal one that is the last in the queue. So the queue is
// emptied just before, and just after.
void WatchedFile::close_own(UniqueFd writer) {
  const std::lock_guard lock(watch_.mutex_);
  watch_.read_events();
  ++own_closes_;
  writer.reset();
  watch_.read_events();
}

Result<void> make_read_only(MappedSegment& segment, WatchedFile& file) {
  if ((::fcntl(segment.fd(), F_GETFL) & O_ACCMODE) == O_RDONLY) return {};
  TRY(auto last, duplicate(segment.fd(), "duplicate a descriptor"));
  TRY_VOID(segment.make_read_only());
  file.close_own(std::move(last));
  return {};
}

}  // namespace rekindle::store
