#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "src/store/segment_store.h"

namespace rekindle::store {

// Allocates and maps the pages that new files lack, in the order of the files, on a thread that
// leads several others, while somebody writes to the files already. A write that comes first
// allocates its page by a fault.
class LaterPages {
 public:
  // Of the segments that lack pages. `promised`: the bytes of all LaterPages of the file system
  // that are still to come. kExhausted: it has no room for these as well.
  static Result<std::unique_ptr<LaterPages>> begin(
      std::vector<std::shared_ptr<MappedSegment>> segments,
      std::shared_ptr<std::atomic<std::uint64_t>> promised);
  // Allocates no more, and returns when no thread touches the files.
  ~LaterPages();
  LaterPages(const LaterPages&) = delete;
  LaterPages& operator=(const LaterPages&) = delete;

 private:
  LaterPages(std::vector<std::shared_ptr<MappedSegment>> segments, std::uint64_t bytes,
             std::shared_ptr<std::atomic<std::uint64_t>> promised);
  void run();

  const std::vector<std::shared_ptr<MappedSegment>> segments_;
  // It counts among the promised bytes with all its own, until its end.
  const std::uint64_t bytes_;
  const std::shared_ptr<std::atomic<std::uint64_t>> promised_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace rekindle::store
