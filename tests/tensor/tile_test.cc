#include "src/tensor/tile.h"

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "src/base/blake3.h"
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
    const Digest expected = blake3(packed);
    EXPECT_EQ(digest_tile(info, grid, tile, bytes, Box::whole(shape)), expected);
    EXPECT_EQ(digest_tile(info, grid, tile, packed, box), expected);

    const Box any = test::random_box(rng, shape);
    EXPECT_EQ(digest_box(any, element_bytes, bytes, Box::whole(shape)),
              blake3(test::naive_extract(any, Box::whole(shape), bytes, element_bytes)));
  }
}

TEST(TileDigestTest, LargeStridedBoxesAreStreamed) {
  Rng rng(1);
  const Shape shape{96, 40000};
  const auto bytes = test::random_bytes(rng, shape.product());
  for (const Box& box :
       {Box{{0, 1}, {96, 39999}}, Box{{1, 5}, {95, 13000}}, Box{{0, 9}, {96, 7}}}) {
    EXPECT_EQ(digest_box(box, 1, bytes, Box::whole(shape)),
              blake3(test::naive_extract(box, Box::whole(shape), bytes, 1)));
  }
}

TEST(TileDigestTest, PartsAreJoinedAndNeverLookLikeATile) {
  Rng rng(2);
  const Shape shape{8, 64};
  const auto bytes = test::random_bytes(rng, shape.product());
  const Box whole = Box::whole(shape);
  const HeldBox top{{{0, 0}, {4, 64}}, bytes, whole};
  const HeldBox bottom{{{4, 0}, {4, 64}}, bytes, whole};
  const HeldBox both[] = {top, bottom};
  EXPECT_EQ(digest_parts(both, 1), blake3_derive("rekindle 2026-11 parts of a tile", bytes));
  EXPECT_NE(digest_parts(both, 1), digest_box(whole, 1, bytes, whole));
  const HeldBox swapped[] = {bottom, top};
  EXPECT_NE(digest_parts(swapped, 1), digest_parts(both, 1));
}

// The root by the description in docs/internals/integrity.md, byte by byte.
Digest naive_root(const ModelVersion& id, const TensorSet& tensors,
                  const std::vector<std::vector<Digest>>& leaves) {
  const auto u64 = [](std::uint64_t value) {
    std::string out;
    for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
    return out;
  };
  std::string text = u64(id.model.size()).substr(0, 4) + id.model + u64(id.version) +
                     tensors.digest().to_bytes() + u64(tensors.size());
  for (const auto& of_tensor : leaves) {
    std::string joined;
    for (const Digest& leaf : of_tensor) joined += leaf.to_bytes();
    text += blake3_derive("rekindle 2026-11 tensor node", as_bytes(joined)).to_bytes();
  }
  return blake3_derive("rekindle 2026-11 checkpoint root", as_bytes(text));
}

TEST(CheckpointRootTest, BindsEachLeafToItsTensorPositionModelAndVersion) {
  const auto set = TensorSet::create(
      {{"a", DType::kU8, {3 << 20}}, {"b", DType::kU8, {0}}, {"c", DType::kF32, {2, 2}}});
  const auto tiles = *TileMap::create(*set);
  const std::vector<Digest> leaves = {{1}, {2}, {3}, {4}};
  const ModelVersion id{"org/model", 41};
  const Digest root = checkpoint_root(id, *set, tiles, leaves);
  EXPECT_EQ(root, naive_root(id, *set, {{{1}, {2}, {3}}, {}, {{4}}}));
  EXPECT_NE(checkpoint_root({"org/model", 42}, *set, tiles, leaves), root);
  EXPECT_NE(checkpoint_root({"org/mode", 41}, *set, tiles, leaves), root);
  EXPECT_NE(checkpoint_root(id, *set, tiles, std::vector<Digest>{{2}, {1}, {3}, {4}}), root);
  EXPECT_NE(checkpoint_root(id, *set, tiles, std::vector<Digest>{{1}, {2}, {4}, {3}}), root);
  const auto renamed = TensorSet::create(
      {{"a", DType::kU8, {3 << 20}}, {"b", DType::kU8, {0}}, {"d", DType::kF32, {2, 2}}});
  EXPECT_NE(checkpoint_root(id, *renamed, *TileMap::create(*renamed), leaves), root);
}

// Stored checkpoints depend on it: a changed value needs a new format version.
TEST(CheckpointRootTest, NeverChanges) {
  const auto set = TensorSet::create({{"w", DType::kBF16, {2, 3}}});
  const std::vector<Digest> leaves = {blake3(as_bytes("twelve bytes"))};
  EXPECT_EQ(checkpoint_root({"m", 1}, *set, *TileMap::create(*set), leaves).hex(),
            "1901c1b646bb10b9403a34f8ddbb92c97139ba7873b42042bbf437badd91a6ca");
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
  EXPECT_EQ(set.tiles().size(), set.count());
  for (const TileIndex tile : set.tiles()) EXPECT_TRUE(set.test(tile)) << tile;
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
