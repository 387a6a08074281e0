// The threads of the digest kernels, one after the other on the CPU.
#include "src/cuda/digest_threads.h"

#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "src/base/blake3_core.h"
#include "tests/cuda/random_boxes.h"

namespace rekindle::cuda::testing {
namespace {

// As in rekindle_digest_chunks and rekindle_digest_roots.
Digest digest_by_threads(const BoxBytes& box) {
  std::vector<DigestValue> values(chunks_of(bytes_of(box)));
  for (std::uint32_t chunk = 0; chunk < values.size(); ++chunk) {
    values[chunk] = chunk_value(box, chunk);
  }
  while (values.size() > 1) {
    std::vector<DigestValue> above((values.size() + 1) / 2);
    for (std::uint32_t i = 0; i < above.size(); ++i) {
      above[i] = parent_value(values.data(), static_cast<std::uint32_t>(values.size()), i);
    }
    values = std::move(above);
  }
  Digest digest;
  std::memcpy(digest.bytes.data(), values[0].words, sizeof values[0].words);
  return digest;
}

TEST(DigestThreads, HashBoxesOfEveryShapeAsBlake3OfTheirBytesJoined) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const auto memory = noise(std::size_t{4} << 20, rng);
  const auto base = reinterpret_cast<std::uint64_t>(memory.data());
  for (int i = 0; i < 150; ++i) {
    const BoxBytes box = random_box(rng, memory.size());
    SCOPED_TRACE(fmt::format("at {}: {} x {} x {} bytes, strides {} and {}", box.address,
                             box.planes, box.rows, box.run_bytes, box.plane_stride,
                             box.row_stride));
    const Digest expected = blake3(bytes_in(box, memory));
    EXPECT_EQ(blake3_of_box(box_at(box, base)), expected);
    EXPECT_EQ(digest_by_threads(box_at(box, base)), expected);
  }
}

TEST(DigestThreads, HashEveryLengthAroundBlocksAndChunks) {
  std::mt19937_64 rng(1);
  const auto memory = noise(std::size_t{1} << 20, rng);
  for (std::uint32_t chunks = 0; chunks < 6; ++chunks) {
    for (const std::uint32_t more : {0u, 1u, 15u, 16u, 63u, 64u, 65u, 1023u}) {
      BoxBytes box;
      box.address = reinterpret_cast<std::uint64_t>(memory.data());
      box.run_bytes = chunks * 1024 + more;
      EXPECT_EQ(digest_by_threads(box), blake3(std::span(memory).first(box.run_bytes)))
          << box.run_bytes;
    }
  }
  BoxBytes tile;
  tile.address = reinterpret_cast<std::uint64_t>(memory.data());
  tile.run_bytes = 1 << 20;
  EXPECT_EQ(digest_by_threads(tile), blake3(memory));
}

}  // namespace
}  // namespace rekindle::cuda::testing
