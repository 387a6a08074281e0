// XXH3 for one SIMD level: CMake compiles this file once per level, with that level's flags and
// names. Everything of xxhash is static inline here, so that the levels do not collide at link
// time.
#define XXH_INLINE_ALL
#define XXH_VECTOR REKINDLE_XXH_VECTOR
#include <xxhash.h>

#include "src/base/digest_kernels.h"

namespace rekindle::digest_detail {
namespace {

std::uint64_t hash64(const void* data, std::size_t size, std::uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}
void hash128(const void* data, std::size_t size, std::uint64_t seed, std::uint64_t* low,
             std::uint64_t* high) {
  const XXH128_hash_t hash = XXH3_128bits_withSeed(data, size, seed);
  *low = hash.low64;
  *high = hash.high64;
}
void* create() { return XXH3_createState(); }
void destroy(void* state) { XXH3_freeState(static_cast<XXH3_state_t*>(state)); }
void reset(void* state, std::uint64_t seed) {
  XXH3_64bits_reset_withSeed(static_cast<XXH3_state_t*>(state), seed);
}
void update(void* state, const void* data, std::size_t size) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, size);
}
std::uint64_t digest(const void* state) {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state));
}

}  // namespace

const Kernels REKINDLE_XXH_TABLE = {REKINDLE_XXH_NAME, hash64, hash128, create,
                                    destroy,           reset,  update,  digest};

}  // namespace rekindle::digest_detail
