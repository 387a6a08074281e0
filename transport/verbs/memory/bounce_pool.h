#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "src/base/result.h"
#include "transport/verbs/device/fabric.h"

namespace rekindle::transport::verbs {

// Registered blocks of one device. Reads land here when they cannot land in their destination: it
// is not registered, or its runs are too short for a request each. Thread-safe.
class BouncePool {
 public:
  static constexpr std::uint32_t kBlockBytes = 256 << 10;
  static constexpr std::uint32_t kScratchBytes = 16 << 10;

  // Makes as many blocks as `bytes` hold, or fewer if the memlock limit is in the way; at least
  // one.
  static Result<std::unique_ptr<BouncePool>> create(Device& device, std::uint64_t bytes);
  ~BouncePool();
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;

  struct Block {
    std::byte* data = nullptr;  // kBlockBytes; null: none
    std::uint32_t lkey = 0;
  };
  Block acquire();  // without data when all are in use: again after a release
  void release(Block block);
  // kScratchBytes that anybody may read into at any time. Nobody looks at the bytes.
  Block scratch() const { return {memory_ + bytes_ - kScratchBytes, mr_->lkey}; }

 private:
  BouncePool() = default;

  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;  // mapped: the blocks, then what scratch() is
  MrHandle mr_;
  std::mutex mutex_;
  std::vector<std::byte*> free_;  // guarded by mutex_
};

}  // namespace rekindle::transport::verbs
