#include "src/tensor/tile.h"

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "tests/tensor/random_tensors.h"

namespace rekindle {
namespace {

using test::Rng;

TEST(TileGridTest, SmallTensorsAreOneTileAndEmptyOnesHaveNone) {
  EXPECT_EQ(TileGrid(DType::kF32, {}).tile_count(), 1u);
  EXPECT_EQ(TileGrid(DType::kU8, {64 << 10}).tile_count(), 1u);
  EXPECT_EQ(TileGrid(DType::kU8, {0}).tile_count(), 0u);
  EXPECT_EQ(TileGrid(DType::kF32, {1 << 20, 0, 1 << 20}).tile_count(), 0u);
}

TEST(TileGridTest, CutsAreTheDocumentedOnes) {
  // Row-parallel TP: the last dimension in 16 (512 B runs), then rows until 1 MiB.
  const TileGrid o_proj(DType::kF8E4M3, {7168, 8192});
  EXPECT_EQ(o_proj.tile_extent(), (Dims{2048, 512}));
  EXPECT_EQ(o_proj.tile_count(), 4u * 16u);
  // 16 would leave runs of 32 bytes: rows only.
  EXPECT_EQ(TileGrid(DType::kF8E4M3, {100000, 512}).tile_extent(), (Dims{2048, 512}));
  // 16 does not divide 1000.
  EXPECT_EQ(TileGrid(DType::kBF16, {4000, 1000}).tile_extent(), (Dims{524, 1000}));
  EXPECT_EQ(TileGrid(DType::kU8, {3 << 20}).tile_extent(), (Dims{1 << 20}));
  // A row of the first dimension is above 1 MiB: it is cut to one, then the next dimension.
  EXPECT_EQ(TileGrid(DType::kBF16, {8, 4096, 4096}).tile_extent(), (Dims{1, 2048, 256}));
  // At last the last dimension is cut again.
  EXPECT_EQ(TileGrid(DType::kF64, {2, 32 << 20}).tile_extent(), (Dims{1, 1 << 17}));
}

TEST(TileGridTest, TilesPartitionTheTensorAndAreNumberedRowMajor) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 100; ++round) {
    const auto dtype = static_cast<DType>(1 + test::below(rng, 16));
    Shape shape = test::random_shape(rng, 4, 60);
    if (shape.rank() > 0) shape[shape.rank() - 1] *= 16 * (1 + test::below(rng, 4));
    const TileGrid grid(dtype, shape);
    std::uint64_t elements = 0;
    Box before;
    for (std::uint64_t i = 0; i < grid.tile_count(); ++i) {
      const Box box = grid.tile_box(i);
      ASSERT_TRUE(check_box(box, shape));
      EXPECT_LE(box.elements() * dtype_size_bytes(dtype), kMaxTileBytes);
      if (i > 0) {
        EXPECT_LT(before.offset, box.offset);
      }
      elements += box.elements();
      before = box;
    }
    EXPECT_EQ(elements, shape.product());

    const Box box = test::random_box(rng, shape);
    std::vector<std::uint64_t> touched;
    grid.tiles_of(box, touched);
    EXPECT_TRUE(std::is_sorted(touched.begin(), touched.end()));
    std::uint64_t in_touched = 0;
    std::uint64_t shared = 0;
    for (const std::uint64_t tile : touched) {
      const auto part = intersect(grid.tile_box(tile), box);
      ASSERT_TRUE(part);
      shared += part->elements();
      in_touched += grid.tile_box(tile).elements();
      EXPECT_TRUE(contains(grid.align_out(box), grid.tile_box(tile)));
    }
    EXPECT_EQ(shared, box.elements());
    EXPECT_EQ(in_touched, grid.align_out(box).elements());
  }
}

TEST(TileMapTest, NumbersTilesOfTheWholeSet) {
  const auto set = TensorSet::create({{"a", DType::kU8, {3 << 20}},
                                      {"b", DType::kU8, {0}},
                                      {"c", DType::kF32, {}},
                                      {"d", DType::kU8, {2 << 20}}});
  const auto map = TileMap::create(*set);
  ASSERT_TRUE(map);
  EXPECT_EQ(map->tile_count(), 6u);
  EXPECT_EQ(map->tensor_of(0), 0u);
  EXPECT_EQ(map->tensor_of(2), 0u);
  EXPECT_EQ(map->tensor_of(3), 2u);  // the empty tensor has no tile
  EXPECT_EQ(map->tensor_of(4), 3u);
  EXPECT_EQ(map->tile_box(5), (Box{{1 << 20}, {1 << 20}}));
}

TEST(TileMapTest, MoreTilesThan32BitsAreRefused) {
  const auto set = TensorSet::create({{"a", DType::kU8, {std::uint64_t{1} << 52}}});
  const auto map = TileMap::create(*set);
  ASSERT_FALSE(map);
  EXPECT_EQ(map.error().code(), ErrorCode::kInvalid);
}

TEST(TileDigestTest, IsTheSameInEveryArrayThatHoldsTheTile) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 60; ++round) {
    const auto dtype = static_cast<DType>(1 + test::below(rng, 16));
    const std::uint64_t element_bytes = dtype_size_bytes(dtype);
    Shape shape = test::random_shape(rng, 4, 14);
    if (shape.rank() > 0) shape[shape.rank() - 1] *= 16;
    const TensorInfo info{"w", dtype, shape};
    const auto bytes = test::random_bytes(rng, info.size_bytes());
    const TileGrid grid(dtype, shape);
    const std::uint64_t tile = test::below(rng, grid.tile_count());
    const Box box = grid.tile_box(tile);
    const auto packed = test::naive_extract(box, Box::whole(shape), bytes, element_bytes);
    const std::uint64_t expected = xxh3_64(packed, tile_seed(5, tile));
    EXPECT_EQ(digest_tile(info, 5, grid, tile, bytes, Box::whole(shape)), expected);
    EXPECT_EQ(digest_tile(info, 5, grid, tile, packed, box), expected);

    const Box any = test::random_box(rng, shape);
    EXPECT_EQ(digest_box(any, element_bytes, 7, bytes, Box::whole(shape)),
              xxh3_64(test::naive_extract(any, Box::whole(shape), bytes, element_bytes), 7));
  }
}

TEST(TileDigestTest, LargeStridedBoxesAreStreamed) {
  Rng rng(1);
  const Shape shape{96, 40000};
  const auto bytes = test::random_bytes(rng, shape.product());
  for (const Box& box :
       {Box{{0, 1}, {96, 39999}}, Box{{1, 5}, {95, 13000}}, Box{{0, 9}, {96, 7}}}) {
    EXPECT_EQ(digest_box(box, 1, 3, bytes, Box::whole(shape)),
              xxh3_64(test::naive_extract(box, Box::whole(shape), bytes, 1), 3));
  }
}

TEST(TileDigestTest, EqualBytesAtAnotherPositionHaveAnotherDigest) {
  const TensorInfo info{"w", DType::kU8, {2 << 20}};
  const TileGrid grid(info.dtype, info.shape);
  const std::vector<std::byte> zeros(info.size_bytes());
  const Box whole = Box::whole(info.shape);
  EXPECT_NE(digest_tile(info, 0, grid, 0, zeros, whole),
            digest_tile(info, 0, grid, 1, zeros, whole));
  EXPECT_NE(digest_tile(info, 0, grid, 0, zeros, whole),
            digest_tile(info, 1, grid, 0, zeros, whole));
}

TEST(TileDigestTest, SeedsAndRootsNeverChange) {
  EXPECT_EQ(tile_seed(0, 0), 0xe220a8397b1dcdafu);
  const auto set = TensorSet::create({{"w", DType::kBF16, {2, 3}}});
  const std::uint64_t digest = 0x0123456789abcdef;
  const Digest128 root = checkpoint_root(*set, {&digest, 1});
  EXPECT_EQ(root.hex(), "4e8b0ef84e7070662257ef6fad81eaf8");
  EXPECT_NE(checkpoint_root(*set, {}), root);
}

TEST(TileSetTest, RangesCountsAndWords) {
  TileSet set(200);
  EXPECT_EQ(set.count(), 0u);
  EXPECT_TRUE(set.ranges().empty());
  set.set_range(3, 5);
  set.set_range(60, 195);
  set.set(199);
  set.reset(100);
  using Range = std::pair<TileIndex, TileIndex>;
  EXPECT_EQ(set.ranges(), (std::vector<Range>{{3, 5}, {60, 100}, {101, 195}, {199, 200}}));
  EXPECT_EQ(set.count(), 2u + 40u + 94u + 1u);
  EXPECT_TRUE(set.test(194));
  EXPECT_FALSE(set.test(195));
  set.set_range(0, 200);
  EXPECT_TRUE(set.all());
  EXPECT_EQ(set.ranges(), (std::vector<Range>{{0, 200}}));
  EXPECT_TRUE(TileSet().all());
}

TEST(TileSetTest, RangesAgreeWithBits) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 200; ++round) {
    TileSet set(static_cast<TileIndex>(1 + test::below(rng, 300)));
    for (TileIndex i = 0; i < set.size(); ++i) {
      if (test::below(rng, 3) != 0) set.set(i);
    }
    TileSet again(set.size());
    for (const auto& [begin, end] : set.ranges()) {
      EXPECT_TRUE(begin == 0 || !set.test(begin - 1));
      EXPECT_TRUE(end == set.size() || !set.test(end));
      again.set_range(begin, end);
    }
    EXPECT_TRUE(std::equal(set.words().begin(), set.words().end(), again.words().begin()));
  }
}

}  // namespace
}  // namespace rekindle
