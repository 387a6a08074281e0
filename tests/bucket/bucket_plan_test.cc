#include "src/bucket/bucket_plan.h"

#include <cstring>
#include <map>

#include <gtest/gtest.h>

#include "tests/bucket/sample.h"

namespace rekindle::bucket {
namespace {

using testing::random_boxes;
using testing::random_sample;
using testing::Sample;
using testing::sample_of;

// What a consumer would have after all buckets: the bytes of each piece, by its index.
std::map<std::uint32_t, std::string> carry_out(const Sample& sample, const Contents& contents,
                                               const Plan& plan, std::uint64_t bucket_bytes) {
  std::map<std::uint32_t, std::string> pieces;
  for (std::size_t bucket = 0; bucket < plan.size(); ++bucket) {
    EXPECT_LE(plan.bytes(bucket), bucket_bytes);
    std::string memory(plan.bytes(bucket), '\0');
    for (const SegmentCopy& copy : plan.copies(bucket)) {
      for (std::uint64_t row = 0; row < copy.rows; ++row) {
        const std::uint64_t from = copy.from + row * copy.from_stride;
        memory.replace(copy.at + row * copy.to_stride, copy.run_bytes,
                       sample.segments[copy.segment], from, copy.run_bytes);
      }
    }
    for (const Part& part : plan.parts(bucket)) {
      EXPECT_EQ(part.at % kPartAlignment, 0u);
      std::string& piece = pieces[part.piece];
      EXPECT_EQ(piece.size(), part.offset_bytes) << "parts of a piece come in order, each once";
      piece += memory.substr(part.at, part.bytes);
    }
  }
  EXPECT_EQ(pieces.size(), contents.pieces().size());
  return pieces;
}

// A bucket asks for the tiles that its parts touch: with them alone its bytes are what they must
// be.
void expect_tiles_cover(const Contents& contents, const Plan& plan, std::size_t bucket) {
  std::uint64_t asked = 0;
  TileIndex last = 0;
  for (const auto& [begin, end] : plan.tiles(bucket)) {
    EXPECT_TRUE(asked == 0 || begin > last) << "ascending and apart";
    EXPECT_LT(begin, end);
    asked += end - begin;
    last = end;
  }
  TileSet touched(contents.tiles().tile_count());
  for (const Part& part : plan.parts(bucket)) {
    const Piece& piece = contents.pieces()[part.piece];
    const std::uint64_t element = contents.element_bytes(piece);
    const TileGrid& grid = contents.tiles().grid(piece.tensor);
    for (std::uint64_t e = 0; e < part.bytes / element; ++e) {
      std::uint64_t rest = part.offset_bytes / element + e;
      Dims at = Dims::zeros(piece.box().rank());
      for (std::size_t d = at.rank(); d-- > 0;) {
        at[d] = piece.box().offset[d] + rest % piece.box().extent[d];
        rest /= piece.box().extent[d];
      }
      Dims one = Dims::zeros(at.rank());
      for (std::size_t d = 0; d < one.rank(); ++d) one[d] = 1;
      std::vector<std::uint64_t> tiles;
      grid.tiles_of({at, one}, tiles);
      touched.set(contents.tiles().first_tile(piece.tensor) +
                  static_cast<TileIndex>(tiles.front()));
    }
  }
  TileSet wanted(contents.tiles().tile_count());
  for (const auto& [begin, end] : plan.tiles(bucket)) wanted.set_range(begin, end);
  EXPECT_TRUE(std::equal(touched.words().begin(), touched.words().end(), wanted.words().begin()));
  EXPECT_EQ(asked, touched.count());
}

TEST(Plan, EveryPieceIsCarriedOnceAndInOrderWhateverTheLayoutAndTheBucket) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 40; ++round) {
    const Sample sample = random_sample(random);
    const Contents contents = sample.contents(
        round % 2 == 0 ? std::vector<NamedBox>() : random_boxes(random, sample.tensors));
    const std::uint64_t bucket_bytes = kPartAlignment + random() % 200'000;
    const auto plan = Plan::create(contents, bucket_bytes);
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->payload_bytes(), contents.total_bytes());
    const auto pieces = carry_out(sample, contents, *plan, bucket_bytes);
    for (std::uint32_t i = 0; i < contents.pieces().size(); ++i) {
      ASSERT_EQ(pieces.at(i), sample.bytes_of(contents, contents.pieces()[i]))
          << contents.pieces()[i].name() << contents.pieces()[i].box().to_string();
    }
    if (round < 4) {
      for (std::size_t b = 0; b < plan->size(); ++b) expect_tiles_cover(contents, *plan, b);
    }
  }
}

TEST(Plan, WhatLiesSideBySideIsOneCopyAndAPieceThatFitsIsNotCut) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 1000; ++i)
    tensors.push_back({"t" + std::to_string(i), DType::kBF16, {16, 64}});
  const Sample sample = sample_of(std::move(tensors), 1);
  const Contents contents = sample.contents();
  const auto plan = Plan::create(contents, 64 << 10);
  ASSERT_TRUE(plan);
  ASSERT_EQ(plan->size(), (1000u + 31) / 32);
  for (std::size_t b = 0; b < plan->size(); ++b) {
    EXPECT_EQ(plan->copies(b).size(), 1u);
    for (const Part& part : plan->parts(b)) EXPECT_EQ(part.bytes, 2048u);
  }
}

TEST(Plan, AStridedShardIsOneCopyOfManyRows) {
  const Sample sample = sample_of({{"w", DType::kBF16, {512, 1024}}}, 2);
  const Contents contents = sample.contents({{"w", {0, 256}, {512, 256}}});
  const auto plan = Plan::create(contents, 1 << 20);
  ASSERT_TRUE(plan);
  ASSERT_EQ(plan->size(), 1u);
  ASSERT_EQ(plan->copies(0).size(), 1u);
  const SegmentCopy& copy = plan->copies(0).front();
  EXPECT_EQ(copy.rows, 512u);
  EXPECT_EQ(copy.run_bytes, 512u);
  EXPECT_EQ(copy.from_stride, 2048u);
  EXPECT_EQ(copy.to_stride, 512u);
}

TEST(Plan, BucketsTooSmallForAnythingAreRefused) {
  const Sample sample = sample_of({{"w", DType::kU8, {10}}}, 3);
  const auto plan = Plan::create(sample.contents(), kPartAlignment - 1);
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::bucket
