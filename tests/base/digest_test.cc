#include "src/base/digest.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/digest_kernels.h"

namespace rekindle {
namespace {

std::vector<std::byte> pattern(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  return bytes;
}

struct Known {
  std::size_t size;
  std::uint64_t unseeded;
  std::uint64_t seeded;   // with 0x9E3779B97F4A7C15
  const char* digest128;  // with seed 3
};
// From the Python xxhash package.
constexpr Known kKnown[] = {
    {0, 0x2d06800538d394c2, 0x602b0e2cd6662c8b, "ea4dc78b2c6f4269d3433e0549a42266"},
    {1, 0xc44bdff4074eecdb, 0x62b185e4e01441a, "70328f0de7aaec445e67710b0462ae47"},
    {17, 0xf34c3c9cf5a112d1, 0x215d8e2b47eb92db, "0fc99025ec2fae0b1ad08b0841ebe2c8"},
    {200, 0x7c64f3b17285e96a, 0x8d9ac599068d0aae, "eb95258e8297a83a4bee62ff6d337c71"},
    {241, 0x541b19226f0052e8, 0x6ec6d69819587a84, "64903edd663e076296acc65a9634d224"},
    {1024, 0x71bee625238addb4, 0xb76cb4813088fe8e, "bf56d15cecce8fc78605a93d2bdda552"},
    {5000, 0xed0146266d138bd8, 0xf9a86cac78470579, "e4a8390712fe6fe1daab0043a4ebb86e"},
};

TEST(DigestTest, MatchesTheReferenceImplementation) {
  for (const Known& known : kKnown) {
    const auto bytes = pattern(known.size);
    EXPECT_EQ(xxh3_64(bytes, 0), known.unseeded) << known.size;
    EXPECT_EQ(xxh3_64(bytes, 0x9E3779B97F4A7C15), known.seeded) << known.size;
    EXPECT_EQ(xxh3_128(bytes, 3).hex(), known.digest128) << known.size;
  }
}

TEST(DigestTest, EverySimdLevelOfThisCpuAgrees) {
  std::vector<const digest_detail::Kernels*> levels = {&digest_detail::kSse2};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) levels.push_back(&digest_detail::kAvx2);
  if (__builtin_cpu_supports("avx512f")) levels.push_back(&digest_detail::kAvx512);
#endif
  for (const auto* level : levels) {
    for (const Known& known : kKnown) {
      const auto bytes = pattern(known.size);
      EXPECT_EQ(level->hash64(bytes.data(), bytes.size(), 0), known.unseeded) << level->name;
      Digest128 digest;
      level->hash128(bytes.data(), bytes.size(), 3, &digest.low, &digest.high);
      EXPECT_EQ(digest.hex(), known.digest128) << level->name;
    }
  }
  EXPECT_EQ(digest_simd_level(), levels.back()->name);
}

TEST(DigestTest, PiecesHashLikeTheWhole) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const auto bytes = pattern(20'000);
  Hasher64 hasher(0);
  for (int round = 0; round < 50; ++round) {
    hasher.reset(seed);
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t size = std::min<std::size_t>(rng() % 3000, bytes.size() - at);
      hasher.update(std::span(bytes).subspan(at, size));
      at += size;
    }
    EXPECT_EQ(hasher.digest(), xxh3_64(bytes, seed));
  }
}

TEST(DigestTest, HexSurvivesAndBadHexIsRefused) {
  const Digest128 digest{0x0123456789abcdef, 0xfedcba9876543210};
  EXPECT_EQ(digest.hex(), "fedcba98765432100123456789abcdef");
  EXPECT_EQ(Digest128::from_hex(digest.hex()).value(), digest);
  for (const char* bad :
       {"", "0", "fedcba98765432100123456789abcdeg", "fedcba98765432100123456789abcdef0",
        "+edcba98765432100123456789abcdef"}) {
    EXPECT_FALSE(Digest128::from_hex(bad)) << bad;
  }
}

}  // namespace
}  // namespace rekindle
