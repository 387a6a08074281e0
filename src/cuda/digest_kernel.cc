#include "src/cuda/digest_kernel.h"

#include <cstddef>
#include <utility>

#include "src/cuda/digest_kernel_ptx.h"
#include "src/cuda/digest_threads.h"

namespace rekindle::cuda {

namespace {

// Of a block; the kernels are compiled for this number.
constexpr unsigned kDigestThreads = 128;

std::uint32_t values_per_box(std::uint64_t longest_bytes) {
  return chunks_of(static_cast<std::uint32_t>(longest_bytes));
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

}  // namespace rekindle::cuda
