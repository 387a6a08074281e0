#include "transport/verbs/staged/stage_pool.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/mman.h>

#include "src/base/units.h"
#include "transport/verbs/staged/stage_wire.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint32_t kLeastBlockBytes = 16 << 10;
// The place of the sent message in the page of messages. It has a separate cache line.
constexpr std::size_t kSentAt = 128;
// A link gets at most one in this many of the free blocks.
constexpr std::size_t kLinkShareOfFree = 4;

}  // namespace

StagePool::StagePool(Device& device, std::uint64_t bytes) : device_(device) {
  for (std::uint32_t block = kMaxStageBlockBytes; block >= kLeastBlockBytes; block /= 4) {
    if (make(bytes, block)) return;
  }
  if (!problem_.empty()) return;
  problem_ = bytes == 0 ? "no staging window is configured"
                        : fmt::format("{} are not enough for a staging window: raise `ulimit -l`",
                                      format_bytes(bytes));
}

bool StagePool::make(std::uint64_t bytes, std::uint32_t block_bytes) {
  const std::size_t step = block_bytes + kPageBytes;
  const std::size_t wanted = bytes / block_bytes;
  if (wanted == 0) return false;
  void* const memory =
      ::mmap(nullptr, wanted * step, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    problem_ = fmt::format("mmap of a staging window: {}", std::strerror(errno));
    return false;
  }
  // A child must not share pages that a NIC writes to.
  (void)::madvise(memory, wanted * step, MADV_DONTFORK);
  auto* const base = static_cast<std::byte*>(memory);
  Api& api = device_.api();
  const int windows = device_.limits().memory_windows_2b ? IBV_ACCESS_MW_BIND : 0;
  for (std::size_t i = 0; i < wanted; ++i) {
    std::byte* const data = base + i * step;
    MrHandle mr(api.reg_mr(device_.pd(), data, step, IBV_ACCESS_LOCAL_WRITE | windows), {&api});
    if (!mr) {
      problem_ = fmt::format("not even a staging window of {} can be registered: {}",
                             format_bytes(step), std::strerror(errno));
      break;
    }
    std::byte* const messages = data + block_bytes;
    free_.push_back({data, messages, messages + kSentAt, mr.get()});
    regions_.push_back(std::move(mr));
  }
  if (regions_.empty()) {
    ::munmap(memory, wanted * step);
    return false;
  }
  problem_.clear();
  memory_ = base;
  mapped_bytes_ = wanted * step;
  block_bytes_ = block_bytes;
  return true;
}

StagePool::~StagePool() {
  regions_.clear();
  if (memory_ != nullptr) ::munmap(memory_, mapped_bytes_);
}

std::vector<StageBlock> StagePool::acquire(std::size_t wanted) {
  const std::lock_guard lock(mutex_);
  const std::size_t share = std::max<std::size_t>(free_.size() / kLinkShareOfFree, 1);
  const std::size_t count = std::min({wanted, share, free_.size()});
  const auto from = free_.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<StageBlock> blocks(from, free_.end());
  free_.erase(from, free_.end());
  return blocks;
}

void StagePool::release(const std::vector<StageBlock>& blocks) {
  // The next session must not read this one's bytes. Without memory windows its key opens the
  // messages, too.
  for (const StageBlock& block : blocks) std::memset(block.data, 0, step_bytes());
  const std::lock_guard lock(mutex_);
  free_.insert(free_.end(), blocks.begin(), blocks.end());
}

Result<std::unique_ptr<StageControl>> StageControl::create(Device& device) {
  static_assert((2 * kMaxStageBlocks + 1) * kStageMessageBytes <= kPageBytes);
  std::unique_ptr<StageControl> control(new StageControl);
  void* const page =
      ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return fail_errno(errno, "messages of a staged link: mmap");
  control->page_ = static_cast<std::byte*>(page);
  // A child must not share a page that a NIC writes to.
  (void)::madvise(page, kPageBytes, MADV_DONTFORK);
  control->mr_ = MrHandle(
      device.api().reg_mr(device.pd(), page, kPageBytes, IBV_ACCESS_LOCAL_WRITE), {&device.api()});
  if (!control->mr_) return fail_errno(errno, device.name() + ": register messages");
  return control;
}

StageControl::~StageControl() {
  mr_.reset();
  if (page_ != nullptr) ::munmap(page_, kPageBytes);
}

}  // namespace rekindle::transport::verbs
