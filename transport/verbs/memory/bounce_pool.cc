#include "transport/verbs/memory/bounce_pool.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/mman.h>

#include "src/base/units.h"

namespace rekindle::transport::verbs {

Result<std::unique_ptr<BouncePool>> BouncePool::create(Device& device, std::uint64_t bytes) {
  std::unique_ptr<BouncePool> pool(new BouncePool);
  int error = 0;
  for (std::uint64_t blocks = std::max<std::uint64_t>(bytes / kBlockBytes, 1); blocks > 0;
       blocks /= 2) {
    const std::uint64_t size = blocks * kBlockBytes + kScratchBytes;
    void* memory =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return fail_errno(errno, "bounce buffers: mmap");
    // A child must not share pages that a NIC writes to.
    (void)::madvise(memory, size, MADV_DONTFORK);
    pool->mr_ = MrHandle(device.api().reg_mr(device.pd(), memory, size, IBV_ACCESS_LOCAL_WRITE),
                         {&device.api()});
    if (pool->mr_) {
      pool->memory_ = static_cast<std::byte*>(memory);
      pool->bytes_ = size;
      break;
    }
    error = errno;
    ::munmap(memory, size);
  }
  if (!pool->mr_) {
    return fail(ErrorCode::kExhausted,
                "{}: not even {} of bounce buffers can be registered: {}; raise `ulimit -l`",
                device.name(), format_bytes(kBlockBytes + kScratchBytes), std::strerror(error));
  }
  for (std::size_t at = pool->bytes_ - kScratchBytes; at > 0; at -= kBlockBytes) {
    pool->free_.push_back(pool->memory_ + at - kBlockBytes);
  }
  return pool;
}

BouncePool::~BouncePool() {
  mr_.reset();
  if (memory_ != nullptr) ::munmap(memory_, bytes_);
}

BouncePool::Block BouncePool::acquire() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return {};
  std::byte* const data = free_.back();
  free_.pop_back();
  return {data, mr_->lkey};
}

void BouncePool::release(Block block) {
  const std::lock_guard lock(mutex_);
  free_.push_back(block.data);
}

}  // namespace rekindle::transport::verbs
