#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::store {

class MappedSegment;
class WatchedFile;

// Notices every process that writes to a file of a copy on its way, from before its tiles are
// digested until the commit. It uses inotify. A write or truncation by a system call is noticed at
// once. A store through a mapping is noticed when the process has closed its last descriptor and
// mapping; until then no read lease is granted. The kernel reports that close before it can grant
// the lease. So a caller that takes the lease first and asks afterwards misses no writer. Stores
// through this process's own mappings are not noticed.
//
// One per store. Thread-safe.
class WriteWatch {
 public:
  // The events of a file since it was added.
  struct Seen {
    bool watched = false;  // false: the events are not known
    bool written = false;  // by a system call of any process
    bool closed = false;   // by a process that had it open for writing
  };
  WriteWatch() = default;
  WriteWatch(const WriteWatch&) = delete;
  WriteWatch& operator=(const WriteWatch&) = delete;

  // Watches the open file from here on, also when it is renamed. `path` is for messages. Never
  // null. The watch must outlive the file.
  std::unique_ptr<WatchedFile> add(int fd, const std::filesystem::path& path);
  // Up to now; one for each of `files`, which are of this watch.
  std::vector<Seen> seen(std::span<const std::unique_ptr<WatchedFile>> files);

 private:
  friend class WatchedFile;
  Result<int> start(int fd);
  void remove(WatchedFile& file);
  void read_events();
  void lose_all();

  std::mutex mutex_;  // guards all below, and the files' Seen
  UniqueFd inotify_;  // opened for the first file
  // By the number that inotify gave. Two watches of one file share it.
  std::multimap<int, WatchedFile*> files_;
  bool told_ = false;  // the log says that inotify does not work
};

// The end of the watch of one file, when it is destroyed. Thread-safe.
class WatchedFile {
 public:
  ~WatchedFile();
  WatchedFile(const WatchedFile&) = delete;
  WatchedFile& operator=(const WatchedFile&) = delete;

  // Closes `writer`, the last of this process's ways to write to the file. This close is not
  // noticed, nor is one of another process while this function runs.
  void close_own(UniqueFd writer);

 private:
  friend class WriteWatch;
  WatchedFile(WriteWatch& watch, int number) : watch_(watch), number_(number) {}
  void note(std::uint32_t events);  // under the mutex of the watch

  WriteWatch& watch_;
  const int number_;  // of inotify; -1: not watched
  // Both guarded by the mutex of the watch.
  WriteWatch::Seen seen_;
  int own_closes_ = 0;  // whose events are still to come
};

// MappedSegment::make_read_only() of a segment whose file is watched.
Result<void> make_read_only(MappedSegment& segment, WatchedFile& file);

}  // namespace rekindle::store
