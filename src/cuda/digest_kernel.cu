// The kernels of DigestKernel. tools/generate/digest-ptx compiles them to digest_kernel.ptx, which
// is checked in: a build needs no CUDA compiler.
#include "src/cuda/digest_threads.h"

using rekindle::BoxBytes;
using rekindle::cuda::bytes_of;
using rekindle::cuda::chunk_value;
using rekindle::cuda::chunks_of;
using rekindle::cuda::DigestValue;
using rekindle::cuda::parent_value;

// Block (x, y): box x, chunks 128 * y and on, one a thread. Their values go to
// values[x * values_per_box + chunk]. Clears `mismatches`, one bit for each box, unless it is null.
extern "C" __global__ void __launch_bounds__(128)
    rekindle_digest_chunks(const BoxBytes* __restrict__ boxes, std::uint32_t values_per_box,
                           DigestValue* __restrict__ values,
                           std::uint32_t* __restrict__ mismatches) {
  const std::uint32_t at = blockIdx.x;
  const std::uint32_t chunk = blockIdx.y * blockDim.x + threadIdx.x;
  if (chunk == 0 && at % 32 == 0 && mismatches != nullptr) mismatches[at / 32] = 0;
  const BoxBytes& box = boxes[at];
  if (chunk >= chunks_of(bytes_of(box))) return;
  values[std::uint64_t{at} * values_per_box + chunk] = chunk_value(box, chunk);
}

// Block x: the tree of box x. Writes its digest to digests[x], unless that is null, and sets its
// bit in `mismatches` where `expected`, unless that is null, has another one.
extern "C" __global__ void __launch_bounds__(128)
    rekindle_digest_roots(const BoxBytes* __restrict__ boxes, std::uint32_t values_per_box,
                          const DigestValue* __restrict__ values, DigestValue* __restrict__ digests,
                          const DigestValue* __restrict__ expected,
                          std::uint32_t* __restrict__ mismatches) {
  __shared__ DigestValue odd[512];
  __shared__ DigestValue even[256];
  const std::uint32_t at = blockIdx.x;
  const DigestValue* from = values + std::uint64_t{at} * values_per_box;
  DigestValue* to = odd;
  std::uint32_t count = chunks_of(bytes_of(boxes[at]));
#pragma unroll 1
  while (count > 1) {
    const std::uint32_t above = (count + 1) / 2;
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < above; i += blockDim.x) {
      to[i] = parent_value(from, count, i);
    }
    __syncthreads();
    from = to;
    to = to == odd ? even : odd;
    count = above;
  }
  if (threadIdx.x != 0) return;
  const DigestValue digest = from[0];
  if (digests != nullptr) digests[at] = digest;
  if (expected == nullptr) return;
  std::uint32_t difference = 0;
  for (int i = 0; i < 8; ++i) difference |= digest.words[i] ^ expected[at].words[i];
  if (difference != 0) atomicOr(&mismatches[at / 32], 1u << at % 32);
}
