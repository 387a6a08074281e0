#include "src/cuda/digest_kernel.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

#include "src/base/units.h"
#include "src/cuda/digest_kernel_ptx.h"
#include "src/cuda/digest_threads.h"

namespace rekindle::cuda {

namespace {

// Of a block; the kernels are compiled for this number.
constexpr unsigned kDigestThreads = 128;

std::uint32_t values_per_box(std::uint64_t longest_bytes) {
  return chunks_of(static_cast<std::uint32_t>(longest_bytes));
}

constexpr std::size_t kPage = 4096;
// Of a launch: 256 tiles of 1 MiB.
constexpr std::uint64_t kScratchBytes = 8u << 20;
// Every second box of 40 bytes begins at a multiple of 16.
constexpr std::size_t kEven = 2;

std::uint64_t boxes_bytes(std::size_t count) { return round_up(count * sizeof(BoxBytes), 256); }
std::uint64_t results_bytes(std::size_t count) { return round_up(count * sizeof(Digest), 256); }

// In 64 bits, because a box may be too long.
std::uint64_t box_bytes(const BoxBytes& box) {
  return std::uint64_t{box.run_bytes} * box.rows * box.planes;
}

// The number of boxes that go into the next launch, and the longest of them.
struct Batch {
  std::size_t count = 0;
  std::uint64_t longest = 0;
};
Batch first_batch(std::span<const BoxBytes> boxes) {
  Batch batch;
  while (batch.count < boxes.size()) {
    const std::size_t count = std::min(batch.count + kEven, boxes.size());
    std::uint64_t longest = batch.longest;
    for (const BoxBytes& box : boxes.subspan(batch.count, count - batch.count)) {
      longest = std::max(longest, box_bytes(box));
    }
    const auto scratch = DigestKernel::scratch_bytes(static_cast<std::uint32_t>(count), longest);
    if (batch.count > 0 && scratch > kScratchBytes) break;
    batch = {count, longest};
  }
  return batch;
}

}  // namespace

static_assert(offsetof(BoxBytes, run_bytes) == 8 && offsetof(BoxBytes, row_stride) == 24);

std::unique_ptr<DigestKernel> DigestKernel::load(std::shared_ptr<const Context> context) {
  const Api& api = context->api();
  CUmodule module = nullptr;
  if (api.module_load(&module, kDigestPtx) != CUDA_SUCCESS) return nullptr;
  CUfunction chunks = nullptr;
  CUfunction roots = nullptr;
  if (api.module_function(&chunks, module, "rekindle_digest_chunks") != CUDA_SUCCESS ||
      api.module_function(&roots, module, "rekindle_digest_roots") != CUDA_SUCCESS) {
    api.module_unload(module);
    return nullptr;
  }
  return std::unique_ptr<DigestKernel>(new DigestKernel(std::move(context), module, chunks, roots));
}

std::uint64_t DigestKernel::scratch_bytes(std::uint32_t count, std::uint64_t longest_bytes) {
  return std::uint64_t{count} * values_per_box(longest_bytes) * sizeof(DigestValue);
}

CUresult DigestKernel::launch(const Work& work, CUstream stream) const {
  if (work.count == 0) return CUDA_SUCCESS;
  if (work.longest_bytes > kMostBytes || (work.expected != 0 && work.mismatches == 0)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Api& api = module_.context().api();
  CUdeviceptr boxes = work.boxes;
  CUdeviceptr values = work.scratch;
  CUdeviceptr digests = work.digests;
  CUdeviceptr expected = work.expected;
  CUdeviceptr mismatches = work.mismatches;
  std::uint32_t per_box = values_per_box(work.longest_bytes);
  const unsigned groups = (per_box + kDigestThreads - 1) / kDigestThreads;
  void* of_chunks[] = {&boxes, &per_box, &values, &mismatches};
  const CUresult result = api.launch(chunks_, work.count, groups, 1, kDigestThreads, 1, 1, 0,
                                     stream, of_chunks, nullptr);
  if (result != CUDA_SUCCESS) return result;
  void* of_roots[] = {&boxes, &per_box, &values, &digests, &expected, &mismatches};
  return api.launch(roots_, work.count, 1, 1, kDigestThreads, 1, 1, 0, stream, of_roots, nullptr);
}

std::uint64_t CudaDigests::device_bytes(std::size_t capacity) {
  return boxes_bytes(capacity) + results_bytes(capacity) + kScratchBytes;
}

CudaDigests::CudaDigests(std::shared_ptr<const DigestKernel> kernel,
                         std::unique_ptr<bucket::Memory> memory, std::size_t capacity)
    : kernel_(std::move(kernel)),
      memory_(std::move(memory)),
      capacity_(capacity),
      host_bytes_(round_up(boxes_bytes(capacity) + results_bytes(capacity), kPage)),
      host_(static_cast<std::byte*>(::operator new (host_bytes_, std::align_val_t{kPage}))) {}

void CudaDigests::Free::operator()(std::byte* memory) const {
  ::operator delete (memory, std::align_val_t{kPage});
}

Digest* CudaDigests::results() const {
  return reinterpret_cast<Digest*>(host_.get() + boxes_bytes(capacity_));
}

CUresult CudaDigests::queue(std::span<const BoxBytes> boxes, const Api& api, CUstream stream) {
  count_ = boxes.size();
  if (boxes.empty()) return CUDA_SUCCESS;
  std::memcpy(host_.get(), boxes.data(), boxes.size_bytes());
  const CUdeviceptr memory = memory_->address();
  const CUdeviceptr scratch_at = memory + boxes_bytes(capacity_) + results_bytes(capacity_);
  const CUdeviceptr boxes_at = is_mapped_ ? reinterpret_cast<CUdeviceptr>(host_.get()) : memory;
  const CUdeviceptr results_at = boxes_at + boxes_bytes(capacity_);
  CUresult result = CUDA_SUCCESS;
  if (!is_mapped_) {
    result = api.copy_to_device(boxes_at, host_.get(), boxes.size_bytes(), stream);
  }
  for (std::size_t first = 0; result == CUDA_SUCCESS && first < boxes.size();) {
    const Batch batch = first_batch(boxes.subspan(first));
    result = kernel_->launch({.boxes = boxes_at + first * sizeof(BoxBytes),
                              .count = static_cast<std::uint32_t>(batch.count),
                              .longest_bytes = batch.longest,
                              .scratch = scratch_at,
                              .digests = results_at + first * sizeof(Digest)},
                             stream);
    first += batch.count;
  }
  if (result != CUDA_SUCCESS || is_mapped_) return result;
  return api.copy_to_host(results(), results_at, boxes.size() * sizeof(Digest), stream);
}

}  // namespace rekindle::cuda
