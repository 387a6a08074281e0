#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "recovery/device/device_order.h"
#include "src/base/clock.h"
#include "src/base/unique_fd.h"
#include "src/base/worker_pool.h"
#include "src/bucket/pinned.h"

namespace rekindle::device {

using Segment = std::shared_ptr<const bucket::PinnedSegment>;

// Segment files by their identity. A file that several copies or sessions use is mapped and pinned
// once, as long as any of them has it. One thread; segments may be released on other threads.
class SegmentCache {
 public:
  explicit SegmentCache(bucket::Pinner& pinner) : pinner_(pinner) {}

  Result<Segment> get(int fd, std::uint64_t bytes);
  // The next get() maps the file anew.
  void forget(int fd);
  std::uint64_t mapped_bytes() const;

 private:
  struct Entry {
    std::weak_ptr<const bucket::PinnedSegment> segment;
    // Only a writable file can be pinned.
    bool writable = false;
  };
  using Key = std::pair<dev_t, ino_t>;

  bucket::Pinner& pinner_;
  // A file keeps its number as long as it is mapped.
  std::map<Key, Entry> entries_;
};

// Segments of copies that were dropped. A store keeps their files for the next copy of the same
// layout (docs/internals/store.md). While a file has its name it stays mapped and pinned here, so
// the copy that takes the file finds that done. One thread.
class Lingering {
 public:
  // `let_go` unpins, which takes seconds; it does so on another thread.
  explicit Lingering(std::function<void(std::vector<Segment>)> let_go)
      : let_go_(std::move(let_go)) {}

  // `files[i]` is open on segments[i].
  void add(std::vector<Segment> segments, std::vector<UniqueFd> files, TimePoint now);
  // Lets go of segments whose file has lost its name, which somebody else uses again, or which have
  // been here for long. Returns when to look next; nullopt: none is left.
  std::optional<TimePoint> look(TimePoint now);

 private:
  struct One {
    Segment segment;
    UniqueFd file;
    TimePoint until;
  };
  const std::function<void(std::vector<Segment>)> let_go_;
  std::vector<One> all_;
};

// The copies that the agent wants pinned, and everything that is mapped here. One thread.
class PinnedCopies {
 public:
  // `first` pins for all devices; null: there is no device, and nothing can be mapped.
  PinnedCopies(bucket::Device* first, unsigned threads);

  // Null without a device.
  const bucket::Pinner* pinner() const { return pinner_.get(); }
  // `files[i]` has bytes[i] bytes. kNotFound: there is no device.
  Result<std::vector<Segment>> map(const std::vector<UniqueFd>& files,
                                   const std::vector<std::uint64_t>& bytes);
  Result<void> hold(std::uint64_t copy, std::vector<UniqueFd> files,
                    const std::vector<std::uint64_t>& bytes, TimePoint now);
  void drop(std::uint64_t copy, Pages pages, TimePoint now);

  struct Settled {
    std::uint64_t copy = 0;
    Duration elapsed{};
    // Why not all of it is pinned; "": all is.
    std::string problem;
  };
  // Copies whose pinning has ended since the last call.
  std::vector<Settled> take_settled(TimePoint now);
  std::uint64_t pinned_bytes() const;
  // Releases lingering segments. Returns when to look next, also for take_settled(); nullopt:
  // never.
  std::optional<TimePoint> look(TimePoint now);

 private:
  struct Copy {
    std::vector<Segment> segments;
    std::vector<UniqueFd> files;
    TimePoint began;
    bool settled = false;
  };
  void unpin(std::vector<Segment> segments);

  std::unique_ptr<bucket::Pinner> pinner_;
  std::unique_ptr<SegmentCache> cache_;
  // Ends before the pinner does.
  WorkerPool unpinner_{"rk-unpin", 1, 4096};
  std::map<std::uint64_t, Copy> copies_;
  Lingering lingering_{[this](std::vector<Segment> segments) { unpin(std::move(segments)); }};
};

}  // namespace rekindle::device
