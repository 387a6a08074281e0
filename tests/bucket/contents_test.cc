#include "src/bucket/contents.h"

#include <algorithm>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::bucket {
namespace {

struct Copy {
  TensorSet tensors;
  Layout layout;
  std::vector<std::uint64_t> segment_bytes;
};

Copy copy_of(std::vector<TensorInfo> infos) {
  auto tensors = *TensorSet::create(std::move(infos));
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(tensors[i].shape)});
  }
  auto layout = pack_layout(tensors, boxes, std::uint64_t{1} << 30)->layout;
  std::vector<std::uint64_t> bytes;
  for (const SegmentSpec& segment : layout.segments()) bytes.push_back(segment.size_bytes);
  return {std::move(tensors), std::move(layout), std::move(bytes)};
}

Contents contents_of(const Copy& copy, const std::vector<NamedBox>& wanted) {
  auto contents = Contents::create(copy.tensors.serialize(), copy.layout.serialize(), wanted,
                                   copy.segment_bytes);
  if (!contents) throw std::runtime_error(contents.error().message());
  return std::move(*contents);
}

Dims random_dims(std::mt19937_64& random, std::uint64_t most) {
  return {1 + random() % most, 1 + random() % most};
}

// Whatever the order in which tiles come, a piece is complete exactly when every tile that shares
// an element with it is there, and is said once.
TEST(Contents, PiecesAreCompleteExactlyWhenTheirTilesAre) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    const Copy copy = copy_of({{"a", DType::kF32, random_dims(random, 1500)},
                               {"b", DType::kU8, random_dims(random, 3000)},
                               {"c", DType::kF64, Shape{}}});
    std::vector<NamedBox> wanted{{"c", {}, {}}};
    for (int i = 0; i < 6; ++i) {
      const TensorInfo& tensor = copy.tensors[static_cast<TensorIndex>(random() % 2)];
      NamedBox box{tensor.name, {}, {}};
      for (const std::uint64_t size : tensor.shape.span()) {
        const std::uint64_t begin = random() % size;
        box.offset.push_back(begin);
        box.extent.push_back(1 + random() % (size - begin));
      }
      wanted.push_back(std::move(box));
    }
    Contents contents = contents_of(copy, wanted);
    const TileMap tiles = *TileMap::create(copy.tensors);
    std::vector<TileIndex> order(tiles.tile_count());
    for (TileIndex i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);

    std::vector<std::size_t> complete;
    contents.take_empty(complete);
    EXPECT_TRUE(complete.empty());
    TileSet here(tiles.tile_count());
    std::set<std::size_t> said;
    for (const TileIndex tile : order) {
      complete.clear();
      ASSERT_TRUE(contents.mark_ready({{tile, tile + 1}}, complete));
      here.set(tile);
      for (const std::size_t piece : complete) EXPECT_TRUE(said.insert(piece).second);
      for (std::size_t i = 0; i < contents.pieces().size(); ++i) {
        const Piece& piece = contents.pieces()[i];
        std::vector<std::uint64_t> touched;
        tiles.grid(piece.tensor).tiles_of(piece.box(), touched);
        const bool whole = std::all_of(touched.begin(), touched.end(), [&](std::uint64_t local) {
          return here.test(tiles.first_tile(piece.tensor) + static_cast<TileIndex>(local));
        });
        ASSERT_EQ(said.count(i) == 1, whole) << piece.name() << piece.box().to_string();
      }
    }
    EXPECT_EQ(contents.ready_bytes(), contents.total_bytes());
  }
}

TEST(Contents, RunsThatAreNoneAreRefusedAndChangeNothing) {
  const Copy copy = copy_of({{"a", DType::kU8, Shape{10}}});
  Contents contents = contents_of(copy, {});
  std::vector<std::size_t> complete;
  EXPECT_FALSE(contents.mark_ready({{0, 1}, {0, 2}}, complete));
  EXPECT_FALSE(contents.mark_ready({{1, 1}}, complete));
  EXPECT_FALSE(contents.mark_ready({{1, 0}}, complete));
  EXPECT_TRUE(complete.empty());
  EXPECT_TRUE(contents.mark_ready({{0, 1}}, complete));
  EXPECT_EQ(complete.size(), 1u);
  contents.mark_all_ready(complete);
  EXPECT_EQ(complete.size(), 1u) << "each once";
}

TEST(Contents, BoxesThatLeaveTheirTensorAreRefused) {
  const Copy copy = copy_of({{"a", DType::kU8, Shape{10, 10}}});
  const auto refused = [&](NamedBox box) {
    const auto contents =
        Contents::create(copy.tensors.serialize(), copy.layout.serialize(),
                         std::vector<NamedBox>{std::move(box)}, copy.segment_bytes);
    return !contents && contents.error().code() == ErrorCode::kInternal;
  };
  EXPECT_TRUE(refused({"a", {0, 0}, {11, 10}}));
  EXPECT_TRUE(refused({"a", {1, 0}, {~std::uint64_t{0}, 10}}));
  EXPECT_TRUE(refused({"a", {0}, {10}}));
  EXPECT_TRUE(refused({"a", {0, 0}, {10}}));
  EXPECT_TRUE(refused({"b", {}, {}}));
}

}  // namespace
}  // namespace rekindle::bucket
