#pragma once

#include <cstddef>
#include <cstdint>

// XXH3-64 for one SIMD level; one table per compilation of xxh3_level.cc.
namespace rekindle::xxh3_detail {

struct Kernels {
  const char* name;
  std::uint64_t (*hash64)(const void* data, std::size_t size, std::uint64_t seed);
};

extern const Kernels kSse2;
extern const Kernels kAvx2;
extern const Kernels kAvx512;

}  // namespace rekindle::xxh3_detail
