#pragma once

#include <cstddef>
#include <cstdint>

// The XXH3 entry points of one SIMD level; one table per compilation of digest_level.cc.
namespace rekindle::digest_detail {

struct Kernels {
  const char* name;
  std::uint64_t (*hash64)(const void* data, std::size_t size, std::uint64_t seed);
  void (*hash128)(const void* data, std::size_t size, std::uint64_t seed, std::uint64_t* low,
                  std::uint64_t* high);
  // Streaming; the state is XXH3_state_t, whose layout is the same at every level.
  void* (*create)();
  void (*destroy)(void* state);
  void (*reset)(void* state, std::uint64_t seed);
  void (*update)(void* state, const void* data, std::size_t size);
  std::uint64_t (*digest)(const void* state);
};

extern const Kernels kSse2;
extern const Kernels kAvx2;
extern const Kernels kAvx512;

}  // namespace rekindle::digest_detail
