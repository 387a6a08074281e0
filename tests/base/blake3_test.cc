#include "src/base/blake3.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/blake3_core.h"

namespace rekindle {
namespace {

using blake3_detail::supported_levels;
using Bytes = std::span<const std::byte>;

struct Vector {
  std::size_t size;
  const char* hash;
  const char* derive_key;
};
constexpr Vector kVectors[] = {
#include "tests/base/blake3_vectors.inc"
};
constexpr const char* kVectorContext = "BLAKE3 2019-12-27 16:29:52 test vectors context";

// The input of the vectors: 0, 1, …, 250, 0, …
std::vector<std::byte> vector_input(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i % 251);
  return bytes;
}

std::vector<std::byte> random_bytes(std::size_t size, std::mt19937_64& rng) {
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng());
  return bytes;
}

// BLAKE3 as section 2 of its paper says it, recursively and without any of our code: slow, and
// plain enough to be read beside the paper.
namespace paper {

using Words = std::array<std::uint32_t, 16>;
using Value = std::array<std::uint32_t, 8>;
constexpr Value kIv = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr std::uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;

void g(Words& v, std::size_t a, std::size_t b, std::size_t c, std::size_t d, std::uint32_t x,
       std::uint32_t y) {
  v[a] += v[b] + x;
  v[d] = std::rotr(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 12);
  v[a] += v[b] + y;
  v[d] = std::rotr(v[d] ^ v[a], 8);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 7);
}

Value compress(const Value& h, Words m, std::uint64_t t, std::size_t length, std::uint32_t flags) {
  constexpr std::size_t kPermutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
  Words v = {h[0],
             h[1],
             h[2],
             h[3],
             h[4],
             h[5],
             h[6],
             h[7],
             kIv[0],
             kIv[1],
             kIv[2],
             kIv[3],
             static_cast<std::uint32_t>(t),
             static_cast<std::uint32_t>(t >> 32),
             static_cast<std::uint32_t>(length),
             flags};
  for (int round = 0; round < 7; ++round) {
    for (std::size_t i = 0; i < 4; ++i) g(v, i, 4 + i, 8 + i, 12 + i, m[2 * i], m[2 * i + 1]);
    for (std::size_t i = 0; i < 4; ++i) {
      g(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[8 + 2 * i], m[9 + 2 * i]);
    }
    const Words before = m;
    for (std::size_t i = 0; i < 16; ++i) m[i] = before[kPermutation[i]];
  }
  Value out;
  for (std::size_t i = 0; i < 8; ++i) out[i] = v[i] ^ v[i + 8];
  return out;
}

Value node(Bytes bytes, const Value& key, std::uint64_t first_chunk, std::uint32_t last) {
  if (bytes.size() <= 1024) {
    Value h = key;
    std::size_t at = 0;
    do {
      const Bytes block = bytes.subspan(at, std::min<std::size_t>(64, bytes.size() - at));
      Words m{};
      for (std::size_t i = 0; i < block.size(); ++i) {
        m[i / 4] |= std::to_integer<std::uint32_t>(block[i]) << 8 * (i % 4);
      }
      std::uint32_t flags = at == 0 ? kChunkStart : 0;
      at += block.size();
      if (at == bytes.size()) flags |= kChunkEnd | last;
      h = compress(h, m, first_chunk, block.size(), flags);
    } while (at < bytes.size());
    return h;
  }
  // The left subtree is the largest complete one that leaves at least a byte to the right.
  const std::size_t left_chunks = std::bit_floor((bytes.size() - 1) / 1024);
  const Value left = node(bytes.first(left_chunks * 1024), key, first_chunk, 0);
  const Value right = node(bytes.subspan(left_chunks * 1024), key, first_chunk + left_chunks, 0);
  Words m;
  std::copy(left.begin(), left.end(), m.begin());
  std::copy(right.begin(), right.end(), m.begin() + 8);
  return compress(key, m, 0, 64, kParent | last);
}

std::string hash(Bytes bytes) {
  std::string hex;
  for (const std::uint32_t word : node(bytes, kIv, 0, kRoot)) {
    for (int i = 0; i < 4; ++i) hex += fmt::format("{:02x}", word >> 8 * i & 0xff);
  }
  return hex;
}

}  // namespace paper

TEST(Blake3Test, OfficialVectorsAtEveryLevel) {
  for (const auto* level : supported_levels()) {
    SCOPED_TRACE(level->name);
    for (const Vector& vector : kVectors) {
      const auto input = vector_input(vector.size);
      EXPECT_EQ(blake3_detail::hash(*level, input).hex(), vector.hash) << vector.size;
      EXPECT_EQ(blake3_detail::derive(*level, kVectorContext, input).hex(), vector.derive_key)
          << vector.size;
    }
  }
}

TEST(Blake3Test, OfficialVectorsInOneGoAndInPieces) {
  Blake3 deriver(kVectorContext);
  for (const Vector& vector : kVectors) {
    const auto input = vector_input(vector.size);
    EXPECT_EQ(blake3(input).hex(), vector.hash) << vector.size;
    EXPECT_EQ(blake3_derive(kVectorContext, input).hex(), vector.derive_key) << vector.size;
    Blake3 hasher;
    deriver.reset();
    for (const std::byte& byte : input) {
      hasher.update({&byte, 1});
      deriver.update({&byte, 1});
    }
    EXPECT_EQ(hasher.finish().hex(), vector.hash) << vector.size;
    EXPECT_EQ(deriver.finish().hex(), vector.derive_key) << vector.size;
  }
}

TEST(Blake3Test, TheFastestLevelOfThisCpuIsUsed) {
  ASSERT_FALSE(supported_levels().empty());
  EXPECT_STREQ(supported_levels().front()->name, "portable");
  EXPECT_EQ(blake3_simd_level(), supported_levels().back()->name);
}

// All sizes around the borders of chunks, groups, batches and lanes, at addresses of any alignment.
TEST(Blake3Test, EveryLevelAgreesWithThePaper) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  std::vector<std::size_t> sizes;
  constexpr std::size_t kChunks[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 100, 1024};
  constexpr std::size_t kMore[] = {0, 1, 64, 1023};
  for (const std::size_t chunks : kChunks) {
    for (const std::size_t more : kMore) sizes.push_back(chunks * 1024 + more);
    sizes.push_back(chunks * 1024 - 1);
  }
  for (int i = 0; i < 20; ++i) sizes.push_back(rng() % 200'000);
  sizes.push_back((std::size_t{3} << 20) + 5);
  sizes.push_back((std::size_t{2} << 20) - 1);
  const auto bytes = random_bytes((std::size_t{3} << 20) + 128, rng);
  for (const std::size_t size : sizes) {
    const auto input = std::span(bytes).subspan(rng() % 64, size);
    const std::string expected = paper::hash(input);
    for (const auto* level : supported_levels()) {
      EXPECT_EQ(blake3_detail::hash(*level, input).hex(), expected) << level->name << ' ' << size;
    }
    EXPECT_EQ(blake3(input).hex(), expected) << size;
  }
}

TEST(Blake3Test, PiecesHashLikeTheWholeAtEveryLevel) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const auto bytes = random_bytes(std::size_t{5} << 20, rng);
  // Of pieces: short ones, some that end with a group or a batch, and long ones.
  constexpr std::size_t kLongest[] = {5, 3000, 16 << 10, 32 << 10, 300'000, 3 << 20};
  for (const auto* level : supported_levels()) {
    SCOPED_TRACE(level->name);
    Blake3 hasher(*level);
    for (int round = 0; round < 40; ++round) {
      hasher.reset();
      const std::size_t longest = kLongest[rng() % std::size(kLongest)];
      const std::size_t size = rng() % std::min(bytes.size(), 200 * longest + 1);
      const bool even = rng() % 2 == 0;
      for (std::size_t at = 0; at < size;) {
        const std::size_t some = std::min(even ? longest : rng() % (longest + 1), size - at);
        hasher.update(std::span(bytes).subspan(at, some));
        at += some;
        if (rng() % 100 == 0) {
          ASSERT_EQ(hasher.finish(), blake3(std::span(bytes).first(at))) << at;
        }
      }
      ASSERT_EQ(hasher.finish(), blake3(std::span(bytes).first(size))) << size << ' ' << longest;
    }
  }
}

TEST(Blake3Test, ACounterOfMoreThan32BitsReachesEveryLane) {
  const std::uint64_t counter = (std::uint64_t{7} << 32) - 5;
  const auto bytes = vector_input(19 * 1024);
  const std::uint32_t* const key = paper::kIv.data();
  for (const auto* level : supported_levels()) {
    std::vector<std::byte> values(19 * 32);
    level->chunks(bytes.data(), 19, key, counter, 0, values.data());
    for (std::size_t i = 0; i < 19; ++i) {
      const auto expected =
          paper::node(std::span(bytes).subspan(i * 1024, 1024), paper::kIv, counter + i, 0);
      EXPECT_EQ(std::memcmp(values.data() + 32 * i, expected.data(), 32), 0)
          << level->name << ' ' << i;
    }
  }
}

TEST(Blake3Test, ModesAndContextsDiffer) {
  const auto bytes = vector_input(100);
  EXPECT_NE(blake3(bytes), blake3_derive("a", bytes));
  EXPECT_NE(blake3_derive("a", bytes), blake3_derive("b", bytes));
}

}  // namespace
}  // namespace rekindle
