#include "transport/verbs/memory/gpu_memory.h"

#include <algorithm>
#include <cerrno>

#include <sys/mman.h>

#include "src/base/units.h"
#include "transport/verbs/memory/device_share.h"

namespace rekindle::transport::verbs {

Result<std::shared_ptr<GpuMemory>> GpuMemory::create(std::span<const Device* const> devices, int fd,
                                                     std::uint64_t bytes) {
  if (devices.empty() || bytes == 0 || bytes % kPageBytes != 0) {
    return fail(ErrorCode::kInvalid, "register {} bytes of GPU memory with {} devices", bytes,
                devices.size());
  }
  void* const reserved =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return fail_errno(errno, "reserve addresses for GPU memory");
  std::shared_ptr<GpuMemory> memory(new GpuMemory(static_cast<std::byte*>(reserved), bytes));
  const auto address = reinterpret_cast<std::uint64_t>(reserved);
  for (const Device* const device : devices) {
    // Without relaxed ordering: the completion must not overtake the bytes.
    TRY(auto mr, register_gpu_range(*device, fd, 0, bytes, address, IBV_ACCESS_LOCAL_WRITE));
    const Piece piece{
        .offset = 0, .bytes = bytes, .address = address, .lkey = mr->lkey, .mr = mr.get()};
    memory->on_.push_back({device, piece, std::move(mr)});
  }
  return memory;
}

GpuMemory::~GpuMemory() {
  on_.clear();
  ::munmap(addresses_, size_);
}

const Piece* GpuMemory::find(const Device& device, std::uint64_t offset) const {
  const auto found = std::ranges::find(on_, &device, &On::device);
  return found == on_.end() || offset >= size_ ? nullptr : &found->piece;
}

std::vector<Piece> GpuMemory::pieces(const Device& device) const {
  const Piece* const piece = find(device, 0);
  if (piece == nullptr) return {};
  return {*piece};
}

}  // namespace rekindle::transport::verbs
