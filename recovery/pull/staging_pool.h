#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace rekindle::pull {

// A bounded set of equal buffers for slices that cannot land in place. Thread-safe.
class StagingPool {
 public:
  StagingPool(std::size_t buffer_bytes, std::size_t max_buffers)
      : buffer_bytes_(buffer_bytes), max_buffers_(max_buffers) {}

  std::size_t buffer_bytes() const { return buffer_bytes_; }

  // nullptr when all are in use: try again after a release.
  std::byte* acquire() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      if (buffers_.size() == max_buffers_) return nullptr;
      buffers_.push_back(std::make_unique_for_overwrite<std::byte[]>(buffer_bytes_));
      free_.push_back(buffers_.back().get());
    }
    std::byte* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }
  void release(std::byte* buffer) {
    const std::lock_guard lock(mutex_);
    free_.push_back(buffer);
  }

 private:
  const std::size_t buffer_bytes_;
  const std::size_t max_buffers_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<std::byte[]>> buffers_;  // guarded by mutex_
  std::vector<std::byte*> free_;                       // guarded by mutex_
};

}  // namespace rekindle::pull
