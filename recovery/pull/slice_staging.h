#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "recovery/planner/plan.h"
#include "src/base/units.h"

namespace rekindle::pull {

// Memory for slices that cannot land in place: a bounded set of equal buffers. The slices of a
// staged group share one buffer, which holds the bytes of some slices while others are still to
// come. Thread-safe.
class SliceStaging {
 public:
  explicit SliceStaging(const planner::Plan& plan) : plan_(plan) {}

  // For one more slice that is read. kExhausted: all buffers are in use, try again after a leave().
  Result<std::byte*> take(transport::SliceIndex slice, std::uint64_t bytes);
  // The slice was copied out, or is abandoned. A slice without staging is ignored.
  void leave(transport::SliceIndex slice);
  // Null: the slice has none.
  std::byte* buffer_of(transport::SliceIndex slice) const;

 private:
  // A covering read of half density takes twice the bytes of its slice.
  static constexpr std::size_t kBufferBytes = 8 * kMiB;
  static constexpr std::size_t kMaxBuffers = 8;

  struct Staged {
    std::byte* buffer = nullptr;
    // Slices that are read into the buffer, or lie in it.
    std::uint32_t slices = 0;
  };
  transport::SliceIndex key_of(transport::SliceIndex slice) const;
  // The caller holds mutex_.
  std::byte* acquire();

  const planner::Plan& plan_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<std::byte[]>> buffers_;         // guarded by mutex_
  std::vector<std::byte*> free_;                              // guarded by mutex_
  std::unordered_map<transport::SliceIndex, Staged> staged_;  // guarded by mutex_
};

}  // namespace rekindle::pull
