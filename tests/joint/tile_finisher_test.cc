#include "recovery/joint/tile_finisher.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "tests/joint/joint_sample.h"

namespace rekindle::joint {
namespace {

using test::below;
using test::code_of;
using test::columns;
using test::kId;
using test::pieces_of;
using test::plan_of;
using test::Rng;
using test::rows;
using test::WholeTensor;
using Tiles = std::vector<TileIndex>;
using Leaves = std::vector<std::pair<TileIndex, Digest>>;

Tiles all_tiles(const JointPlan& plan) {
  Tiles tiles;
  for (TileIndex tile = 0; tile < plan.tiles().tile_count(); ++tile) tiles.push_back(tile);
  return tiles;
}

// Whether the host has an element of the tile, by its boxes in `boxes`.
bool has_part(const std::vector<Box>& boxes, const Box& tile) {
  return std::ranges::any_of(boxes,
                             [&](const Box& box) { return intersect(box, tile).has_value(); });
}

// Every host sends the pieces of every tile in ascending order, and the hosts take turns at random.
// Finishing a tile that only one host holds does no harm.
void expect_leaves_of_the_bytes(Rng& rng, const WholeTensor& tensor,
                                const std::vector<std::vector<Box>>& boxes) {
  const auto plan = plan_of(tensor.info, boxes);
  TileFinisher finisher(kId, plan, all_tiles(*plan));
  std::vector<Tiles> to_send(boxes.size());
  for (std::size_t host = 0; host < boxes.size(); ++host) {
    for (const TileIndex tile : all_tiles(*plan)) {
      if (has_part(boxes[host], plan->tiles().tile_box(tile))) to_send[host].push_back(tile);
    }
    std::ranges::reverse(to_send[host]);
  }
  Leaves found;
  while (std::ranges::any_of(to_send, [](const Tiles& tiles) { return !tiles.empty(); })) {
    const auto host = static_cast<std::uint32_t>(below(rng, to_send.size()));
    if (to_send[host].empty()) continue;
    EXPECT_FALSE(finisher.complete());
    const TileIndex tile = to_send[host].back();
    to_send[host].pop_back();
    EXPECT_TRUE(finisher.has_room_for(tile));
    for (std::uint64_t times = 1 + below(rng, 2); times > 0; --times) {
      const auto added = finisher.add(host, tile, pieces_of(*plan, host, tile, tensor));
      ASSERT_TRUE(added) << added.error().message();
    }
    if (below(rng, 2) == 0) continue;
    const Leaves some = test::take_leaves(finisher);
    EXPECT_TRUE(std::ranges::is_sorted(some));
    found.insert(found.end(), some.begin(), some.end());
  }
  const Leaves some = test::take_leaves(finisher);
  EXPECT_TRUE(finisher.complete());
  found.insert(found.end(), some.begin(), some.end());
  EXPECT_TRUE(test::take_leaves(finisher).empty());
  std::ranges::sort(found);
  ASSERT_EQ(found.size(), plan->tiles().tile_count()) << "each leaf comes once";
  for (TileIndex tile = 0; tile < found.size(); ++tile) {
    EXPECT_EQ(found[tile].first, tile);
    EXPECT_EQ(found[tile].second, tensor.leaf(plan->tiles().tile_box(tile)));
  }
}

class TileFinisherTest : public ::testing::Test {
 protected:
  const std::uint64_t seed_ = std::random_device{}();
  const ::testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  Rng rng_{seed_};
  // 16 tiles of 90 rows and 64 columns.
  const WholeTensor tensor_ = test::random_tensor(rng_, "w", DType::kF32, {90, 1024});
  // One tile.
  const WholeTensor small_ = test::random_tensor(rng_, "w", DType::kBF16, {64, 128});
};

TEST_F(TileFinisherTest, RowShardsGiveTheLeavesOfTheTiles) {
  expect_leaves_of_the_bytes(rng_, tensor_,
                             {{rows(0, 23, 1024)}, {rows(23, 46, 1024)}, {rows(46, 90, 1024)}});
}

// The flat shards of FSDP begin and end inside a row.
TEST_F(TileFinisherTest, FlatShardsGiveTheLeavesOfTheTiles) {
  expect_leaves_of_the_bytes(rng_, tensor_,
                             {{rows(0, 22, 1024), {{22, 0}, {1, 513}}},
                              {{{22, 513}, {1, 511}}, rows(23, 45, 1024), {{45, 0}, {1, 2}}},
                              {{{45, 2}, {1, 1022}}, rows(46, 90, 1024)}});
}

TEST_F(TileFinisherTest, ColumnCutsGiveTheLeavesOfTheTiles) {
  expect_leaves_of_the_bytes(
      rng_, tensor_, {{columns(0, 341, 90)}, {columns(341, 683, 90)}, {columns(683, 1024, 90)}});
  expect_leaves_of_the_bytes(rng_, small_, {{columns(0, 1, 64)}, {columns(1, 128, 64)}});
}

TEST_F(TileFinisherTest, ReplicasGiveTheLeavesOfTheTiles) {
  const Box whole = Box::whole(tensor_.info.shape);
  expect_leaves_of_the_bytes(rng_, tensor_, {{whole}, {whole}});
  expect_leaves_of_the_bytes(
      rng_, tensor_, {{rows(0, 50, 1024)}, {columns(100, 700, 90)}, {whole}, {rows(31, 90, 1024)}});
}

TEST_F(TileFinisherTest, OnlyTheLastPieceCompletesATile) {
  const auto plan = plan_of(small_.info, {{rows(0, 21, 128)}, {rows(21, 64, 128)}});
  TileFinisher finisher(kId, plan, {0});
  const std::string first = pieces_of(*plan, 0, 0, small_);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(finisher.add(0, 0, first));
    EXPECT_FALSE(finisher.complete());
    EXPECT_TRUE(test::take_leaves(finisher).empty());
  }
  ASSERT_TRUE(finisher.add(1, 0, pieces_of(*plan, 1, 0, small_)));
  EXPECT_FALSE(finisher.complete()) << "it is not digested";
  EXPECT_EQ(test::take_leaves(finisher), (Leaves{{0, blake3(small_.bytes)}}));
  EXPECT_TRUE(finisher.complete());
  ASSERT_TRUE(finisher.add(1, 0, pieces_of(*plan, 1, 0, small_))) << "a repeated call";
  ASSERT_TRUE(finisher.add(0, 0, first));
  EXPECT_TRUE(test::take_leaves(finisher).empty()) << "a leaf comes once";
}

TEST_F(TileFinisherTest, PiecesOfAWrongLengthAreCorrupt) {
  const auto plan = plan_of(small_.info, {{rows(0, 21, 128)}, {rows(21, 64, 128)}});
  TileFinisher finisher(kId, plan, {0});
  const std::string right = pieces_of(*plan, 1, 0, small_);
  const std::string wrong[] = {"", right.substr(1), right + "x", right + right};
  for (const std::string& pieces : wrong) {
    const auto added = finisher.add(1, 0, pieces);
    EXPECT_EQ(code_of(added), ErrorCode::kCorrupt) << pieces.size();
    EXPECT_NE(added.error().message().find("'w'"), std::string::npos) << added.error().message();
  }
  EXPECT_FALSE(finisher.complete());
  EXPECT_TRUE(test::take_leaves(finisher).empty());
}

TEST_F(TileFinisherTest, OtherBytesOfAReplicaNameTensorAndRanks) {
  WholeTensor other = small_;
  other.bytes[40 * 128 * 2] ^= std::byte{1};  // row 40
  const auto plan = plan_of(small_.info, {{rows(0, 48, 128)}, {rows(32, 64, 128)}});
  TileFinisher finisher(kId, plan, {0});
  ASSERT_TRUE(finisher.add(0, 0, pieces_of(*plan, 0, 0, small_)));
  const auto added = finisher.add(1, 0, pieces_of(*plan, 1, 0, other));
  ASSERT_FALSE(added);
  EXPECT_EQ(added.error().code(), ErrorCode::kInvalid);
  for (const std::string_view words : {"m@7", "'w' [32:48, 0:128]", "ranks 0 and 10"}) {
    EXPECT_NE(added.error().message().find(words), std::string::npos) << added.error().message();
  }
  EXPECT_FALSE(finisher.complete());
}

TEST_F(TileFinisherTest, OtherBytesOutsideOfAReplicaGiveAnotherLeaf) {
  WholeTensor other = small_;
  other.bytes[60 * 128 * 2] ^= std::byte{1};
  const auto plan = plan_of(small_.info, {{rows(0, 48, 128)}, {rows(32, 64, 128)}});
  TileFinisher finisher(kId, plan, {0});
  ASSERT_TRUE(finisher.add(0, 0, pieces_of(*plan, 0, 0, small_)));
  ASSERT_TRUE(finisher.add(1, 0, pieces_of(*plan, 1, 0, other)));
  EXPECT_EQ(test::take_leaves(finisher), (Leaves{{0, blake3(other.bytes)}}));
}

TEST_F(TileFinisherTest, ATileOfAnotherFinisherIsRefused) {
  const auto plan = plan_of(tensor_.info, {{rows(0, 40, 1024)}, {rows(40, 90, 1024)}});
  TileFinisher finisher(kId, plan, {2, 5});
  for (const TileIndex tile : {0u, 3u, 15u, 16u, ~0u}) {
    EXPECT_EQ(code_of(finisher.add(0, tile, "")), ErrorCode::kInvalid) << tile;
  }
  EXPECT_FALSE(finisher.complete());
}

TEST_F(TileFinisherTest, AHostWithoutAPartOfTheTileIsRefused) {
  const auto plan =
      plan_of(tensor_.info, {{rows(0, 40, 1024)}, {rows(40, 90, 1024)}, {columns(0, 64, 90)}});
  TileFinisher finisher(kId, plan, {0, 1});
  EXPECT_EQ(code_of(finisher.add(2, 1, pieces_of(*plan, 0, 1, tensor_))), ErrorCode::kInvalid);
  EXPECT_EQ(code_of(finisher.add(7, 1, "")), ErrorCode::kInvalid) << "no host of the roster";
  ASSERT_TRUE(finisher.add(2, 0, pieces_of(*plan, 2, 0, tensor_)));
}

TEST_F(TileFinisherTest, AFinisherOfNothingIsComplete) {
  const auto plan = plan_of(small_.info, {{rows(0, 21, 128)}, {rows(21, 64, 128)}});
  TileFinisher finisher(kId, plan, {});
  EXPECT_TRUE(finisher.complete());
  EXPECT_TRUE(test::take_leaves(finisher).empty());
  EXPECT_EQ(code_of(finisher.add(0, 0, pieces_of(*plan, 0, 0, small_))), ErrorCode::kInvalid);
}

// Tiles of 1 MiB without short runs that are whole chunks: the piece of a is as long as its part.
TEST_F(TileFinisherTest, AHostThatIsAheadWaitsForRoom) {
  constexpr TileIndex kCount = 300;
  constexpr std::uint64_t kRows = 4096;
  const TensorInfo info{"w", DType::kU8, {kCount * kRows, 256}};
  const auto plan =
      plan_of(info, {{columns(0, 255, kCount * kRows)}, {columns(255, 256, kCount * kRows)}});
  ASSERT_EQ(plan->tiles().tile_count(), kCount);
  TileFinisher finisher(kId, plan, all_tiles(*plan));
  const std::string of_a(kRows * 255, '\0');
  const std::string of_b(kRows, '\0');
  const Digest leaf = blake3(std::vector<std::byte>(kRows * 256));
  TileIndex next = 0;
  const auto fill = [&] {
    while (next < kCount && finisher.has_room_for(next)) {
      ASSERT_TRUE(finisher.add(0, next, of_a));
      ++next;
    }
    ASSERT_LT(next, kCount) << "memory is limited";
  };
  fill();
  EXPECT_GT(next, 100u);
  for (TileIndex lowest = 0; lowest < 5; ++lowest) {
    EXPECT_FALSE(finisher.has_room_for(next));
    EXPECT_FALSE(finisher.has_room_for(lowest + 1)) << "b is ahead, too";
    ASSERT_TRUE(finisher.has_room_for(lowest)) << "it makes room";
    ASSERT_TRUE(finisher.add(1, lowest, of_b));
    EXPECT_FALSE(finisher.has_room_for(next)) << "it is not digested";
    EXPECT_EQ(test::take_leaves(finisher), (Leaves{{lowest, leaf}}));
    EXPECT_TRUE(finisher.has_room_for(lowest)) << "a repeated call needs no room";
    EXPECT_TRUE(finisher.has_room_for(next));
    fill();
  }
}

}  // namespace
}  // namespace rekindle::joint
