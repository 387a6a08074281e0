#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::client {

// Bytes of host memory to copy. Without a source they are at their target already.
struct Copy {
  std::byte* target = nullptr;
  const std::byte* source = nullptr;
  std::uint64_t bytes = 0;
};

// Copies by stores that bypass the cache. Without a source it does nothing.
void copy_to_memory(const Copy& copy);

// Copies host memory in the background. Thread-safe.
class CopyThreads {
 public:
  // `threads`: 0: two less than the process has CPUs, at least 1 and at most kMostThreads.
  // `write`: called by a thread of this object to bring bytes to their target; also for bytes
  // without a source.
  CopyThreads(std::size_t threads, std::function<void(const Copy&)> write);
  ~CopyThreads() { close(); }
  CopyThreads(const CopyThreads&) = delete;
  CopyThreads& operator=(const CopyThreads&) = delete;

  // Begins to copy and returns a number for wait(). Later calls return larger numbers. kStale: it
  // is closed.
  Result<std::uint64_t> put(std::span<const Copy> copies);
  // Waits for all copies up to `number`. kTimeout: some are not done yet. kStale: it was closed
  // before they were.
  Result<void> wait(std::uint64_t number, TimePoint deadline);
  // Drops what no thread has begun. Afterwards nothing reads a source or writes to a target, also
  // when another thread has closed it first.
  void close();

  static constexpr std::size_t kMostThreads = 12;

 private:
  // What one thread copies at a time.
  struct Unit {
    std::uint64_t number = 0;
    std::vector<Copy> copies;
  };
  void run();
  void finish(std::uint64_t number);

  const std::size_t most_threads_;
  const std::function<void(const Copy&)> write_;
  // Held while close() joins the threads. Locked before mutex_.
  std::mutex joining_;
  std::mutex mutex_;  // guards all below
  std::condition_variable has_unit_;
  std::condition_variable done_;
  std::deque<Unit> units_;
  // Units to be done of each call of put() from number `first_` on.
  std::deque<std::size_t> left_;
  std::uint64_t first_ = 1;
  std::size_t idle_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace rekindle::client
