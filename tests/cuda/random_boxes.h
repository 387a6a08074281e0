#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "src/base/blake3_core.h"

namespace rekindle::cuda::testing {

inline std::uint64_t bytes_of_box(const BoxBytes& box) {
  return std::uint64_t{box.run_bytes} * box.rows * box.planes;
}

// Bytes from the first byte to the last.
inline std::uint64_t span_of_box(const BoxBytes& box) {
  if (bytes_of_box(box) == 0) return 0;
  return (box.planes - 1) * box.plane_stride + (box.rows - 1) * box.row_stride + box.run_bytes;
}

// A box of at most a tile inside `memory_bytes` bytes; its address is an offset there. The shapes
// are aligned or odd, and have one run, rows or planes, which may overlap.
inline BoxBytes random_box(std::mt19937_64& rng, std::uint64_t memory_bytes) {
  constexpr std::uint32_t kTile = 1 << 20;
  // 1 to 32 bytes.
  const std::uint32_t unit = std::uint32_t{1} << rng() % 6;
  BoxBytes box;
  if (rng() % 3 == 0) {
    // One run of any length; lengths around the borders of blocks and chunks come more often.
    box.run_bytes = static_cast<std::uint32_t>(rng() % (kTile + 1));
    if (rng() % 2 == 0) box.run_bytes = box.run_bytes / 1024 * 1024;
    if (rng() % 4 == 0) box.run_bytes %= 4096;
    // Unused fields may have any value.
    box.row_stride = rng();
    box.plane_stride = rng();
  } else {
    const std::uint32_t longest = rng() % 2 == 0 ? 200 : 20'000;
    box.run_bytes = static_cast<std::uint32_t>(1 + rng() % (longest / unit)) * unit;
    box.rows = static_cast<std::uint32_t>(1 + rng() % std::min(kTile / box.run_bytes, 3000u));
    if (rng() % 2 == 0) {
      box.planes =
          static_cast<std::uint32_t>(1 + rng() % std::min(kTile / box.run_bytes / box.rows, 50u));
    }
    box.row_stride = box.run_bytes + rng() % 100 * unit;
    box.plane_stride = rng() % (box.rows * box.row_stride + 1) / unit * unit;
    if (box.rows == 1) box.row_stride = rng();
    if (box.planes == 1) box.plane_stride = rng();
  }
  while (box.planes > 1 && span_of_box(box) > memory_bytes) box.planes /= 2;
  while (box.rows > 1 && span_of_box(box) > memory_bytes) box.rows /= 2;
  box.address = rng() % (memory_bytes - span_of_box(box) + 1) / unit * unit;
  return box;
}

// The same box in memory that begins at `base`.
inline BoxBytes box_at(BoxBytes box, std::uint64_t base) {
  box.address += base;
  return box;
}

// Its bytes.
inline std::vector<std::byte> bytes_in(const BoxBytes& box, std::span<const std::byte> memory) {
  std::vector<std::byte> bytes;
  bytes.reserve(bytes_of_box(box));
  for (std::uint64_t plane = 0; plane < box.planes; ++plane) {
    for (std::uint64_t row = 0; row < box.rows; ++row) {
      for (std::uint64_t i = 0; i < box.run_bytes; ++i) {
        const std::uint64_t planes = box.planes > 1 ? plane * box.plane_stride : 0;
        const std::uint64_t rows = box.rows > 1 ? row * box.row_stride : 0;
        bytes.push_back(memory[box.address + planes + rows + i]);
      }
    }
  }
  return bytes;
}

inline std::vector<std::byte> noise(std::size_t size, std::mt19937_64& rng) {
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng());
  return bytes;
}

}  // namespace rekindle::cuda::testing
