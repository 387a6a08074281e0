// CMake compiles this file once for each SIMD level, with that level's flags and names, and once
// without: that one chooses the level. Everything of xxhash is static inline here, so that the
// levels do not collide at link time.
#ifdef REKINDLE_XXH_TABLE
#define XXH_INLINE_ALL
#define XXH_VECTOR REKINDLE_XXH_VECTOR
#include <xxhash.h>
#endif

#include "src/base/xxh3.h"

namespace rekindle {

namespace xxh3_detail {

using Hash = std::uint64_t (*)(const void* data, std::size_t size, std::uint64_t seed);
extern const Hash kSse2;
extern const Hash kAvx2;
extern const Hash kAvx512;

}  // namespace xxh3_detail

#ifdef REKINDLE_XXH_TABLE

namespace {

std::uint64_t hash64(const void* data, std::size_t size, std::uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}

}  // namespace

const xxh3_detail::Hash xxh3_detail::REKINDLE_XXH_TABLE = hash64;

#else

namespace {

xxh3_detail::Hash choose_hash() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return xxh3_detail::kAvx512;
  if (__builtin_cpu_supports("avx2")) return xxh3_detail::kAvx2;
#endif
  return xxh3_detail::kSse2;
}

}  // namespace

std::uint64_t xxh3_64(std::span<const std::byte> bytes, std::uint64_t seed) {
  static const xxh3_detail::Hash hash = choose_hash();
  return hash(bytes.data(), bytes.size(), seed);
}

#endif

}  // namespace rekindle
