#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

// BLAKE3 at one SIMD level: many inputs side by side, one in each lane of the vectors. There is one
// table per compilation of blake3_level.cc.
namespace rekindle::blake3_detail {

struct Level {
  const char* name;
  // Writes the chaining values (32 bytes each) of `count` whole chunks, which lie one after the
  // other at `data`. `key` is 8 words; `counter` is the index of the first chunk in its input.
  void (*chunks)(const std::byte* data, std::size_t count, const std::uint32_t* key,
                 std::uint64_t counter, std::uint32_t flags, std::byte* values);
  // Writes the values of `count` parents of 2 * `count` children. `parents` may be `children`.
  void (*parents)(const std::byte* children, std::size_t count, const std::uint32_t* key,
                  std::uint32_t flags, std::byte* parents);
};

// What this CPU can run, the slowest first. blake3() uses the last one.
std::span<const Level* const> supported_levels();

}  // namespace rekindle::blake3_detail
