#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include <sys/types.h>

#include "src/bucket/pinned.h"

namespace rekindle::device {

using Segment = std::shared_ptr<const bucket::PinnedSegment>;

// Segment files by their identity: one that several copies or sessions use is mapped and pinned
// once, for as long as any of them has it. One thread; the segments may be let go of on others.
class SegmentCache {
 public:
  explicit SegmentCache(bucket::Pinner& pinner) : pinner_(pinner) {}

  Result<Segment> get(int fd, std::uint64_t bytes);
  std::uint64_t mapped_bytes() const;

 private:
  struct Entry {
    std::weak_ptr<const bucket::PinnedSegment> segment;
    bool writable = false;  // only then it can be pinned
  };
  using Key = std::pair<dev_t, ino_t>;

  bucket::Pinner& pinner_;
  std::map<Key, Entry> entries_;  // a file lives, and keeps its number, for as long as it is mapped
};

}  // namespace rekindle::device
