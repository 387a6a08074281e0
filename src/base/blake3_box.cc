#include "src/base/blake3_box.h"

#include "src/base/blake3.h"

namespace rekindle {

Digest blake3_of_box(const BoxBytes& box) {
  const auto* const base = reinterpret_cast<const std::byte*>(box.address);
  if (box.rows == 1 && box.planes == 1) return blake3({base, box.run_bytes});
  Blake3 hasher;
  for (std::uint64_t plane = 0; plane < box.planes; ++plane) {
    for (std::uint64_t row = 0; row < box.rows; ++row) {
      const std::byte* const run = base + plane * box.plane_stride + row * box.row_stride;
      hasher.update({run, box.run_bytes});
    }
  }
  return hasher.finish();
}

}  // namespace rekindle
