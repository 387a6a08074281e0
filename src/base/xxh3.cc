#include "src/base/xxh3.h"

#include "src/base/xxh3_kernels.h"

namespace rekindle {

namespace {

using xxh3_detail::Kernels;

const Kernels& choose_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return xxh3_detail::kAvx512;
  if (__builtin_cpu_supports("avx2")) return xxh3_detail::kAvx2;
#endif
  return xxh3_detail::kSse2;
}

}  // namespace

std::uint64_t xxh3_64(std::span<const std::byte> bytes, std::uint64_t seed) {
  static const Kernels& kernels = choose_kernels();
  return kernels.hash64(bytes.data(), bytes.size(), seed);
}

}  // namespace rekindle
