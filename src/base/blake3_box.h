#pragma once

#include <cstddef>
#include <cstdint>

namespace rekindle {

struct Digest;

// The bytes of a tile where they lie in memory: `planes` planes of `rows` runs of `run_bytes`,
// taken in that order. Strides are in bytes, from start to start, and matter only where their count
// is above 1. A box with more strided dimensions has to be gathered first. The memory is of a GPU
// or of the host, and the struct lies in the GPU's memory as it is here.
struct BoxBytes {
  std::uint64_t address = 0;
  std::uint32_t run_bytes = 0;
  std::uint32_t rows = 1;    // at least 1
  std::uint32_t planes = 1;  // at least 1
  std::uint32_t unused = 0;
  std::uint64_t row_stride = 0;
  std::uint64_t plane_stride = 0;
};
static_assert(sizeof(BoxBytes) == 40);

// The BLAKE3-256 of a box in host memory; any length.
Digest blake3_of_box(const BoxBytes& box);

}  // namespace rekindle
