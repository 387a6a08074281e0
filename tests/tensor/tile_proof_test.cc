#include "src/tensor/tile_proof.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "tests/tensor/random_tensors.h"

namespace rekindle {
namespace {

using test::Rng;

TEST(TileProofTest, EveryRangeOfEverySizeLeadsToTheLeaf) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 400; ++round) {
    const std::uint64_t size = 1 + test::below(rng, round % 2 == 0 ? 5000 : 200'000);
    const auto tile = test::random_bytes(rng, size);
    const std::uint64_t begin = test::below(rng, size);
    const TileRange range{begin, begin + 1 + test::below(rng, size - begin)};
    const auto part = std::span(tile).subspan(range.begin, range.end - range.begin);
    const std::string proof = prove_range(tile, range);
    EXPECT_LE(proof.size(), 2u * 1024 + 20u * 32);
    const auto leaf = leaf_by_proof(part, range, size, proof);
    ASSERT_TRUE(leaf) << leaf.error().message();
    EXPECT_EQ(*leaf, blake3(tile));
  }
}

TEST(TileProofTest, AHolderOfAPartProvesEveryRangeInItAsAHolderOfTheTileDoes) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 400; ++round) {
    const std::uint64_t size = 1 + test::below(rng, round % 2 == 0 ? 5000 : 200'000);
    const auto tile = test::random_bytes(rng, size);
    const auto random_range = [&](TileRange in) {
      const std::uint64_t begin = in.begin + test::below(rng, in.end - in.begin);
      return TileRange{begin, begin + 1 + test::below(rng, in.end - begin)};
    };
    const TileRange held = random_range({0, size});
    const TileRange range = random_range(held);
    const auto part = std::span(tile).subspan(held.begin, held.end - held.begin);
    const std::string proof = prove_range(tile, held);
    EXPECT_EQ(proof.size(), proof_bytes(held, size));
    const auto smaller = prove_smaller_range(part, held, size, proof, range);
    ASSERT_TRUE(smaller) << smaller.error().message();
    EXPECT_EQ(*smaller, prove_range(tile, range));
    EXPECT_FALSE(prove_smaller_range(part, held, size, proof + "x", range));
    if (held.begin > 0) {
      EXPECT_FALSE(prove_smaller_range(part, held, size, proof, {held.begin - 1, held.end}));
    }
  }
}

TEST(TileProofTest, ProofsOfRangesThatMakeUpALargerOneGiveItsProof) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 400; ++round) {
    const std::uint64_t size = 2 + test::below(rng, round % 2 == 0 ? 5000 : 200'000);
    const auto tile = test::random_bytes(rng, size);
    const std::uint64_t begin = test::below(rng, size - 1);
    const TileRange whole{begin, begin + 2 + test::below(rng, size - begin - 1)};
    std::vector<TileRange> ranges;
    for (std::uint64_t at = whole.begin; at < whole.end;) {
      const std::uint64_t end = at + 1 + test::below(rng, whole.end - at);
      ranges.push_back({at, end});
      at = end;
    }
    std::shuffle(ranges.begin(), ranges.end(), rng);
    std::string proof(proof_bytes(whole, size), '\0');
    for (const TileRange& range : ranges) {
      add_to_proof(proof, whole, size, prove_range(tile, range), range);
    }
    EXPECT_EQ(proof, prove_range(tile, whole)) << ranges.size() << " ranges";
  }
}

// S1: a source may choose the part and every byte of the proof.
TEST(TileProofTest, S1NoChangedByteOfPartOrProofLeadsToTheLeaf) {
  Rng rng(7);
  const auto tile = test::random_bytes(rng, 10'000);
  const TileRange range{3000, 5500};
  const std::string proof = prove_range(tile, range);
  const std::vector<std::byte> part(tile.begin() + 3000, tile.begin() + 5500);
  for (std::size_t i = 0; i < proof.size(); ++i) {
    std::string changed = proof;
    changed[i] = static_cast<char>(changed[i] ^ 0x20);
    const auto leaf = leaf_by_proof(part, range, tile.size(), changed);
    ASSERT_TRUE(leaf);
    EXPECT_NE(*leaf, blake3(tile)) << "byte " << i << " of the proof";
  }
  for (std::size_t i = 0; i < part.size(); ++i) {
    std::vector<std::byte> changed = part;
    changed[i] ^= std::byte{1};
    EXPECT_NE(*leaf_by_proof(changed, range, tile.size(), proof), blake3(tile)) << i;
  }
  // The same bytes at another place of the tile.
  const TileRange moved{3001, 5501};
  const auto leaf = leaf_by_proof(part, moved, tile.size(), prove_range(tile, moved));
  EXPECT_NE(*leaf, blake3(tile));
}

TEST(TileProofTest, ProofsOfAnotherLengthAreRefused) {
  Rng rng(8);
  const auto tile = test::random_bytes(rng, 10'000);
  const TileRange range{3000, 5500};
  const auto part = std::span(tile).subspan(3000, 2500);
  const std::string proof = prove_range(tile, range);
  for (std::size_t size = 0; size < proof.size(); ++size) {
    EXPECT_FALSE(leaf_by_proof(part, range, tile.size(), proof.substr(0, size))) << size;
  }
  EXPECT_FALSE(leaf_by_proof(part, range, tile.size(), proof + "x"));
  EXPECT_FALSE(leaf_by_proof(part.first(100), range, tile.size(), proof));
  EXPECT_FALSE(leaf_by_proof(part, {3000, 3000}, tile.size(), proof));
  EXPECT_FALSE(leaf_by_proof(part, {8000, 10'500}, tile.size(), proof));
}

TEST(TileProofTest, PartsAreOneRunWhereTheirElementsFollowEachOther) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  int runs = 0;
  for (int round = 0; round < 2000; ++round) {
    const Shape shape = test::random_shape(rng, 4, 5);
    const Box tile = test::random_box(rng, shape);
    Box part = test::random_box(rng, tile.extent);
    for (std::size_t i = 0; i < part.rank(); ++i) part.offset[i] += tile.offset[i];
    if (part.empty()) {
      EXPECT_FALSE(is_one_run(part, tile));
      continue;
    }
    bool follows = true;
    std::uint64_t first = 0;
    std::uint64_t next = 0;
    bool begun = false;
    test::for_each_element(part, [&](const Dims& at) {
      const std::uint64_t index = test::index_in(tile, at);
      if (!begun) first = next = index;
      begun = true;
      follows = follows && index == next;
      ++next;
    });
    EXPECT_EQ(is_one_run(part, tile), follows) << part.to_string() << " in " << tile.to_string();
    if (!follows) continue;
    ++runs;
    const TileRange range = range_in_tile(part, tile, 4);
    EXPECT_EQ(range.begin, first * 4);
    EXPECT_EQ(range.end, next * 4);
  }
  EXPECT_GT(runs, 100);
}

}  // namespace
}  // namespace rekindle
