#pragma once

#include <atomic>
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
  // kExhausted: the file system of the files has no room for the pages.
  static Result<std::unique_ptr<LaterPages>> begin(
      std::vector<std::shared_ptr<MappedSegment>> segments);
  // Allocates no more, and returns when no thread touches the files.
  ~LaterPages();
  LaterPages(const LaterPages&) = delete;
  LaterPages& operator=(const LaterPages&) = delete;

 private:
  explicit LaterPages(std::vector<std::shared_ptr<MappedSegment>> segments);
  void run();

  const std::vector<std::shared_ptr<MappedSegment>> segments_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace rekindle::store
