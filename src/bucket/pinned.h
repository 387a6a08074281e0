#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// A segment file that is mapped into this process and pinned piece by piece for a device. A pin is
// portable: it serves all devices of the process. Pinning runs beside other work. A piece that
// cannot be pinned is read slower, and is logged once.
class PinnedSegment {
 public:
  virtual ~PinnedSegment() = default;
  const std::byte* data() const { return data_; }
  // Null: the file was opened read-only.
  std::byte* writable() const { return writable_; }
  std::uint64_t bytes() const { return bytes_; }

 protected:
  const std::byte* data_ = nullptr;
  std::byte* writable_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// Pins segments with a few threads, in the order of add(). Thread-safe.
class Pinner {
 public:
  static constexpr std::uint64_t kPieceBytes = 256ull << 20;
  static constexpr unsigned kThreads = 4;

  Pinner(Device& device, unsigned threads);
  // Every segment must be destroyed before.
  ~Pinner();
  Pinner(const Pinner&) = delete;
  Pinner& operator=(const Pinner&) = delete;

  // Maps the first `bytes` of the file, writable if the file was opened for writing, and begins to
  // pin them. kInternal: the file is shorter. The last reference unmaps; no device may use it then.
  Result<std::shared_ptr<const PinnedSegment>> add(int fd, std::uint64_t bytes);

  // Whether pinning of [from, from + bytes) has ended, well or not, so that it can be read now.
  bool settled(const PinnedSegment& segment, std::uint64_t from, std::uint64_t bytes) const;
  // Whether all of [from, from + bytes) is pinned.
  bool pinned(const PinnedSegment& segment, std::uint64_t from, std::uint64_t bytes) const;
  // Waits until all of it is settled. False: the deadline has passed.
  bool wait(const PinnedSegment& segment, TimePoint deadline) const;
  std::uint64_t pinned_bytes() const;
  // Why a settled piece could not be pinned; nullopt: all settled pieces are.
  std::optional<Error> failure(const PinnedSegment& segment) const;

 private:
  struct Segment;
  struct Job {
    std::weak_ptr<Segment> segment;
    std::size_t piece = 0;
  };
  void run();

  Device& device_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  mutable std::condition_variable settled_;
  std::deque<Job> jobs_;
  std::uint64_t pinned_bytes_ = 0;
  // Why there is no thread. Set by the constructor.
  std::optional<Error> no_thread_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace rekindle::bucket
