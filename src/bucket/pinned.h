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

// A segment file mapped into this process and pinned piece by piece for a device (one pin serves
// all devices of the process: it is portable). Pinning goes on beside other work; a piece that
// cannot be pinned is read slower, and that is said once.
class PinnedSegment {
 public:
  virtual ~PinnedSegment() = default;
  const std::byte* data() const { return data_; }
  // Null where the file was given to be read only.
  std::byte* writable() const { return writable_; }
  std::uint64_t bytes() const { return bytes_; }

 protected:
  const std::byte* data_ = nullptr;
  std::byte* writable_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// Pins segments with a few threads, in the order in which they were given. Thread-safe.
class Pinner {
 public:
  static constexpr std::uint64_t kPieceBytes = 256ull << 20;
  static constexpr unsigned kThreads = 4;

  Pinner(Device& device, unsigned threads);
  ~Pinner();  // every segment must be gone
  Pinner(const Pinner&) = delete;
  Pinner& operator=(const Pinner&) = delete;

  // Maps the first `bytes` of the file, to be written too if it was opened so, and begins to pin
  // them. kInternal when the file
  // is shorter. The last reference unmaps; no device may use it then.
  Result<std::shared_ptr<const PinnedSegment>> add(int fd, std::uint64_t bytes);

  // Whether [from, from + bytes) is pinned, or will not be: it can be read now.
  bool settled(const PinnedSegment& segment, std::uint64_t from, std::uint64_t bytes) const;
  // Whether all of [from, from + bytes) is.
  bool pinned(const PinnedSegment& segment, std::uint64_t from, std::uint64_t bytes) const;
  // Until all of it is settled; false: the deadline has passed.
  bool wait(const PinnedSegment& segment, TimePoint deadline) const;
  std::uint64_t pinned_bytes() const;
  // Why a piece of it could not be pinned, as far as that is settled.
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
  std::optional<Error> no_thread_;  // why there is none; set by the constructor
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace rekindle::bucket
