// XXH3 for one SIMD level: CMake compiles this file once per level, with that level's flags and
// names. Everything of xxhash is static inline here, so that the levels do not collide at link
// time.
#define XXH_INLINE_ALL
#define XXH_VECTOR REKINDLE_XXH_VECTOR
#include <xxhash.h>

#include "src/base/xxh3_kernels.h"

namespace rekindle::xxh3_detail {
namespace {

std::uint64_t hash64(const void* data, std::size_t size, std::uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}

}  // namespace

const Kernels REKINDLE_XXH_TABLE = {REKINDLE_XXH_NAME, hash64};

}  // namespace rekindle::xxh3_detail
