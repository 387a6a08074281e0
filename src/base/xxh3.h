#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

// XXH3-64 (https://xxhash.com, BSD-2), compiled in for each SIMD level and chosen once at start:
// the distribution's shared library is built without AVX2 and runs at a third of the speed. It is
// fast and finds damage, but it is no defence against a forger: nothing that leaves this host's
// memory is checked by it.
namespace rekindle {

std::uint64_t xxh3_64(std::span<const std::byte> bytes, std::uint64_t seed);

}  // namespace rekindle
