// What plans look like for layouts that matter: known answers.
#include "recovery/planner/slice_plan.h"

#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/planner/plan_oracle.h"

namespace rekindle::planner::testing {
namespace {

Layout make_layout(const Checkpoint& checkpoint, const std::vector<TensorBox>& boxes) {
  auto packed = pack_layout(checkpoint.tensors, boxes, std::uint64_t{1} << 40);
  EXPECT_TRUE(packed) << packed.error().message();
  return std::move(packed->layout);
}

std::vector<TensorBox> whole(const Checkpoint& checkpoint) {
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < checkpoint.tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(checkpoint.tensors[i].shape)});
  }
  return boxes;
}

std::unique_ptr<Plan> make_plan(const Checkpoint& checkpoint, const Layout& destination,
                                const std::vector<SourceView>& sources,
                                const PlanOptions& options = {}, const TileSet* have = nullptr) {
  auto plan = plan_pull({&checkpoint, &destination, sources, have}, options);
  EXPECT_TRUE(plan) << plan.error().message();
  return std::move(*plan);
}

Expansion expand(const Plan& plan, SliceIndex slice, SourceIndex source = 0) {
  Expansion expansion;
  plan.expand(slice, source, expansion);
  return expansion;
}

std::vector<SliceKind> kinds(const Plan& plan) {
  std::vector<SliceKind> result;
  for (SliceIndex i = 0; i < plan.slice_count(); ++i) result.push_back(plan.kind(i));
  return result;
}

TEST(Plan, SmallNeighboursBecomeOneRead) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 100; ++i) tensors.push_back({fmt::format("t{:03}", i), DType::kBF16, {64}});
  const auto checkpoint = make_checkpoint(tensors);
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const auto plan = make_plan(*checkpoint, layout, {{&layout, nullptr}});
  ASSERT_EQ(plan->slice_count(), 1u);
  EXPECT_EQ(plan->kind(0), SliceKind::kDirect);
  const Expansion expansion = expand(*plan, 0);
  ASSERT_EQ(expansion.reads.size(), 1u);
  EXPECT_EQ(expansion.reads[0].copy.run_bytes, 100u * 128);
  EXPECT_EQ(expansion.reads[0].copy.count, 1u);
  EXPECT_EQ(plan->wire_bytes(), 12800u);
}

TEST(Plan, WholeTensorIsReadInContiguousBandsThatCompleteARowOfTilesTogether) {
  // 16 tiles of 512 KiB side by side: 8 MiB, two slices of 4 MiB.
  const auto checkpoint = make_checkpoint({{"w", DType::kBF16, {1024, 4096}}});
  ASSERT_EQ(checkpoint->tiles.tile_count(), 16u);
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const auto plan = make_plan(*checkpoint, layout, {{&layout, nullptr}});
  ASSERT_EQ(plan->slice_count(), 2u);
  std::vector<TileWork> tiles;
  for (SliceIndex slice = 0; slice < 2; ++slice) {
    EXPECT_EQ(plan->kind(slice), SliceKind::kDirect);
    EXPECT_EQ(plan->group_first(slice), 0u);
    EXPECT_EQ(plan->group_size(slice), 2u);
    const Expansion expansion = expand(*plan, slice);
    ASSERT_EQ(expansion.reads.size(), 1u);
    EXPECT_EQ(expansion.reads[0].copy.run_bytes, 4u << 20);
    plan->tiles(slice, tiles);
    EXPECT_EQ(tiles.size(), slice == 0 ? 0u : 16u);
  }
}

TEST(Plan, RowParallelShardIsOneStridedReadOfWholeTiles) {
  const auto checkpoint = make_checkpoint({{"down", DType::kF8E4M3, {7168, 2048}}});
  const Layout source = make_layout(*checkpoint, whole(*checkpoint));
  const Layout shard = make_layout(*checkpoint, {{0, {{0, 3 * 128}, {7168, 128}}}});
  const auto plan = make_plan(*checkpoint, shard, {{&source, nullptr}});
  ASSERT_EQ(plan->slice_count(), 1u);
  EXPECT_EQ(plan->kind(0), SliceKind::kDirect);
  const Expansion expansion = expand(*plan, 0);
  ASSERT_EQ(expansion.reads.size(), 1u);
  EXPECT_EQ(expansion.reads[0].copy.run_bytes, 128u);
  EXPECT_EQ(expansion.reads[0].copy.count, 7168u);
  EXPECT_EQ(expansion.reads[0].copy.src_stride, 2048u);
  EXPECT_EQ(expansion.reads[0].copy.dst_stride, 128u);
}

TEST(Plan, PartThatWouldMoreThanDoubleTheBytesIsReadAlone) {
  const auto checkpoint = make_checkpoint({{"up", DType::kF8E4M3, {2048, 7168}}});
  const Layout source = make_layout(*checkpoint, whole(*checkpoint));
  const Layout shard = make_layout(*checkpoint, {{0, {{128, 0}, {128, 7168}}}});  // tp=1/16
  const auto plan = make_plan(*checkpoint, shard, {{&source, nullptr}});
  ASSERT_EQ(plan->slice_count(), 1u);
  EXPECT_EQ(plan->kind(0), SliceKind::kRange);
  EXPECT_EQ(plan->wire_bytes(), 128u * 7168);
  ASSERT_EQ(expand(*plan, 0).reads.size(), 1u);
  EXPECT_EQ(expand(*plan, 0).reads[0].copy.run_bytes, 128u * 7168);
  std::vector<TileWork> tiles;
  plan->tiles(0, tiles);
  ASSERT_EQ(tiles.size(), 16u);
  EXPECT_EQ(tiles[1].box, (Box{{128, 448}, {128, 448}}));

  PlanOptions generous;
  generous.max_partial_overhead = 16;
  const auto staged = make_plan(*checkpoint, shard, {{&source, nullptr}}, generous);
  EXPECT_THAT(kinds(*staged), ::testing::Each(SliceKind::kStaged));
  EXPECT_EQ(staged->wire_bytes(), 2048u * 7168);
}

// Eighths become a sixteenth: its 128 rows lie in the second of them, which has 256 of the 2,048
// rows of each tile.
TEST(Plan, AShardProvesThePartsThatAnotherDegreeWants) {
  const auto checkpoint = make_checkpoint({{"up", DType::kF8E4M3, {2048, 7168}}});
  std::vector<Layout> eighths;
  for (std::uint64_t r = 0; r < 8; ++r) {
    eighths.push_back(make_layout(*checkpoint, {{0, {{256 * r, 0}, {256, 7168}}}}));
  }
  const Layout shard = make_layout(*checkpoint, {{0, {{384, 0}, {128, 7168}}}});  // tp=3/16
  const auto plan_over = [&](bool proves) {
    std::vector<SourceView> views;
    for (const Layout& layout : eighths) views.push_back({&layout, nullptr, proves});
    return make_plan(*checkpoint, shard, views);
  };
  const auto plan = plan_over(true);
  ASSERT_EQ(plan->slice_count(), 1u);
  EXPECT_EQ(plan->kind(0), SliceKind::kRange);
  EXPECT_EQ(plan->candidates(0), SourceMask(1 << 1));
  EXPECT_EQ(plan->wire_bytes(), 128u * 7168);
  // Of those that come later.
  EXPECT_TRUE(plan->covered_by(0, eighths[1], true));
  EXPECT_FALSE(plan->covered_by(0, eighths[1], false));
  EXPECT_FALSE(plan->covered_by(0, eighths[2], true));
  EXPECT_TRUE(plan->covered_by(0, make_layout(*checkpoint, whole(*checkpoint)), false));

  const auto without = plan_over(false);
  EXPECT_THAT(kinds(*without), ::testing::Each(SliceKind::kStaged));
  EXPECT_EQ(without->wire_bytes(), 2048u * 7168);
}

TEST(Plan, PartOfATileIsStagedWholeAndScattered) {
  const auto checkpoint = make_checkpoint({{"up", DType::kF8E4M3, {2048, 7168}}});
  const Layout source = make_layout(*checkpoint, whole(*checkpoint));
  const Layout shard = make_layout(*checkpoint, {{0, {{1024, 0}, {1024, 7168}}}});  // tp=1/2
  const auto plan = make_plan(*checkpoint, shard, {{&source, nullptr}});
  EXPECT_THAT(kinds(*plan), ::testing::Each(SliceKind::kStaged));
  EXPECT_EQ(plan->wire_bytes(), 2 * plan->wanted_bytes());
  std::vector<TileWork> tiles;
  plan->tiles(0, tiles);
  const Expansion expansion = expand(*plan, 0);
  ASSERT_EQ(tiles.size(), 4u);  // of 896 KiB
  EXPECT_EQ(tiles[1].staging_offset, 2048u * 448);
  EXPECT_EQ(expansion.staging_bytes, 4u * 2048 * 448);
  ASSERT_EQ(expansion.scatter.size(), 4u);
  EXPECT_EQ(expansion.scatter[0].copy.src_offset, 1024u * 448);
  EXPECT_EQ(expansion.scatter[0].copy.run_bytes, 448u);
}

TEST(Plan, ATinyPartOfASmallTensorIsVerifiedByThePublishersDigest) {
  const auto checkpoint = make_checkpoint({{"scale", DType::kF32, {56, 16}}});
  const Layout source = make_layout(*checkpoint, whole(*checkpoint));
  const Layout shard = make_layout(*checkpoint, {{0, {{3, 0}, {1, 16}}}});
  const auto plan = make_plan(*checkpoint, shard, {{&source, nullptr}});
  EXPECT_THAT(kinds(*plan), ::testing::ElementsAre(SliceKind::kStaged));
  PlanOptions strict;
  strict.small_tile_bytes = 0;
  const auto range = make_plan(*checkpoint, shard, {{&source, nullptr}}, strict);
  EXPECT_THAT(kinds(*range), ::testing::ElementsAre(SliceKind::kRange));
}

TEST(Plan, TilesCutByTheBordersOfAllSourcesArePutTogetherInAGroup) {
  const auto checkpoint = make_checkpoint({{"w", DType::kBF16, {96, 1024}}});
  std::vector<Layout> thirds;
  for (std::uint64_t r = 0; r < 3; ++r) {
    thirds.push_back(make_layout(*checkpoint, {{0, {{32 * r, 0}, {32, 1024}}}}));
  }
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const auto plan = make_plan(
      *checkpoint, layout, {{&thirds[0], nullptr}, {&thirds[1], nullptr}, {&thirds[2], nullptr}});
  ASSERT_EQ(plan->slice_count(), 3u);
  EXPECT_TRUE(plan->missing().empty());
  std::vector<TileWork> tiles;
  for (SliceIndex slice = 0; slice < 3; ++slice) {
    EXPECT_EQ(plan->candidates(slice), SourceMask(std::uint64_t{1} << slice));
    EXPECT_EQ(plan->group_size(slice), 3u);
    EXPECT_EQ(expand(*plan, slice, slice).reads.size(), 1u);
    plan->tiles(slice, tiles);
    EXPECT_EQ(tiles.size(), slice == 2 ? 16u : 0u);
  }
}

// Each source has a row of every tensor, as the hosts of a joint publication may.
TEST(Plan, AVersionInPartsOnEverySourceThatAPlanMayHaveIsCovered) {
  constexpr SourceIndex kParts = transport::kMaxSources;
  const auto checkpoint = make_checkpoint(
      {{"large", DType::kBF16, {kParts, 65536}}, {"small", DType::kF32, {kParts, 16}}});
  std::vector<Layout> parts;
  for (std::uint64_t r = 0; r < kParts; ++r) {
    parts.push_back(make_layout(*checkpoint, {{0, {{r, 0}, {1, 65536}}}, {1, {{r, 0}, {1, 16}}}}));
  }
  std::vector<SourceView> sources;
  for (const Layout& layout : parts) sources.push_back({&layout, nullptr});
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const auto plan = make_plan(*checkpoint, layout, sources);
  EXPECT_TRUE(plan->missing().empty());
  EXPECT_EQ(plan->wire_bytes(), checkpoint->tensors.total_bytes());
  SourceMask needed;
  for (SliceIndex slice = 0; slice < plan->slice_count(); ++slice) {
    ASSERT_EQ(plan->candidates(slice).count(), 1);
    const SourceIndex source = plan->candidates(slice).next();
    EXPECT_FALSE(expand(*plan, slice, source).reads.empty());
    needed.set(source);
  }
  EXPECT_EQ(needed.count(), static_cast<int>(kParts));
  sources.push_back(sources.front());
  EXPECT_FALSE(plan_pull({checkpoint.get(), &layout, sources, nullptr}, {})) << "one too many";
}

TEST(Plan, SmallTensorsHeldInPartsByManySourcesShareOneGroup) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 1000; ++i) {
    tensors.push_back({fmt::format("scale{:04}", i), DType::kF32, {56, 16}});
  }
  const auto checkpoint = make_checkpoint(tensors);
  std::vector<Layout> eighths;
  for (std::uint64_t r = 0; r < 8; ++r) {
    std::vector<TensorBox> boxes = whole(*checkpoint);
    for (TensorBox& box : boxes) box.box = {{0, 2 * r}, {56, 2}};
    eighths.push_back(make_layout(*checkpoint, boxes));
  }
  std::vector<SourceView> sources;
  for (const Layout& layout : eighths) sources.push_back({&layout, nullptr});
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const auto plan = make_plan(*checkpoint, layout, sources);
  ASSERT_EQ(plan->slice_count(), 8u);
  EXPECT_EQ(plan->group_size(7), 8u);
  EXPECT_EQ(plan->slice_bytes(3), 1000u * 56 * 2 * 4);
  std::vector<TileWork> tiles;
  plan->tiles(7, tiles);
  EXPECT_EQ(tiles.size(), 1000u);
}

TEST(Plan, ASourceWithSeveralBoxesOfATensorServesWhatTheyHoldTogether) {
  const auto checkpoint = make_checkpoint({{"w", DType::kU8, {8, 100}}});
  const Layout halves =
      make_layout(*checkpoint, {{0, {{0, 0}, {4, 100}}}, {0, {{4, 0}, {4, 100}}}});
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const auto plan = make_plan(*checkpoint, layout, {{&halves, nullptr}});
  ASSERT_EQ(plan->slice_count(), 1u);
  EXPECT_EQ(plan->group_size(0), 1u);
  EXPECT_EQ(plan->wire_bytes(), 800u);
}

TEST(Plan, HeldTilesLimitTheCandidates) {
  const auto checkpoint = make_checkpoint({{"a", DType::kU8, {100}}, {"b", DType::kU8, {100}}});
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  TileSet only_b(2);
  only_b.set(1);
  const auto plan = make_plan(*checkpoint, layout, {{&layout, &only_b}, {&layout, nullptr}});
  ASSERT_EQ(plan->slice_count(), 2u);
  EXPECT_EQ(plan->candidates(0), SourceMask(0b10));
  EXPECT_EQ(plan->candidates(1), SourceMask(0b11));
  const auto alone = make_plan(*checkpoint, layout, {{&layout, &only_b}});
  ASSERT_EQ(alone->missing().size(), 1u);
  EXPECT_EQ(alone->missing()[0].tensor, 0u);
}

TEST(Plan, VerifiedTilesAreNotFetchedAgain) {
  const auto checkpoint = make_checkpoint({{"w", DType::kBF16, {1024, 4096}}});
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  TileSet have(16);
  have.set_range(0, 15);
  const auto plan = make_plan(*checkpoint, layout, {{&layout, nullptr}}, {}, &have);
  EXPECT_EQ(plan->wire_bytes(), 512u << 10);
  EXPECT_EQ(plan->wanted_bytes(), 512u << 10);
  have.set(15);
  EXPECT_EQ(make_plan(*checkpoint, layout, {{&layout, nullptr}}, {}, &have)->slice_count(), 0u);
}

TEST(Plan, SlicesAndBucketsKeepToTheirSizes) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 60; ++i) {
    tensors.push_back({fmt::format("l{:02}.w", i), DType::kBF16, {1024, 1024}});  // 2 MiB
    tensors.push_back({fmt::format("l{:02}.w.scale", i), DType::kF32, {8, 8}});
  }
  const auto checkpoint = make_checkpoint(tensors);
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const auto plan = make_plan(*checkpoint, layout, {{&layout, nullptr}});
  std::vector<std::uint64_t> buckets(plan->bucket_count());
  for (SliceIndex slice = 0; slice < plan->slice_count(); ++slice) {
    EXPECT_LE(plan->slice_bytes(slice), 4u << 20);
    buckets[plan->bucket(slice)] += plan->slice_bytes(slice);
  }
  EXPECT_THAT(buckets, ::testing::Each(::testing::Le(16u << 20)));
  EXPECT_LE(plan->slice_count(), 60u);  // scales ride along
}

TEST(Plan, MissingNamesTensorsAndParts) {
  const auto checkpoint = make_checkpoint({{"a", DType::kU8, {100}},
                                           {"b", DType::kU8, {8, 100}},
                                           {"c", DType::kU8, {100}},
                                           {"d", DType::kU8, {100}}});
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const Layout some = make_layout(*checkpoint, {{1, {{0, 0}, {5, 100}}}});
  const auto plan = make_plan(*checkpoint, layout, {{&some, nullptr}});
  EXPECT_EQ(plan->slice_count(), 0u);
  EXPECT_EQ(describe_missing(*checkpoint, plan->missing(), 2),
            "a (100 B) is held by no source; "
            "b[5:8, 0:100] (300 B of 800 B) is held by no source; "
            "and 2 more");
  EXPECT_EQ(describe_missing(*checkpoint, {}, 2), "");
  const auto nobody = make_plan(*checkpoint, layout, {});
  EXPECT_EQ(nobody->missing().size(), 4u);
}

TEST(Plan, OneMissingTensorOfManyTilesIsOneBox) {
  const auto checkpoint = make_checkpoint({{"w", DType::kBF16, {8192, 4096}}});
  const Layout layout = make_layout(*checkpoint, whole(*checkpoint));
  const auto plan = make_plan(*checkpoint, layout, {});
  ASSERT_EQ(plan->missing().size(), 1u);
  EXPECT_EQ(plan->missing()[0].box, Box::whole(checkpoint->tensors[0].shape));
}

TEST(Plan, RefusesWhatBelongsToAnotherCheckpoint) {
  const auto one = make_checkpoint({{"a", DType::kU8, {100}}});
  const auto two = make_checkpoint({{"a", DType::kU8, {100}}, {"b", DType::kU8, {100}}});
  const Layout of_one = make_layout(*one, whole(*one));
  const Layout of_two = make_layout(*two, whole(*two));
  const std::vector<SourceView> sources{{&of_two, nullptr}};
  EXPECT_EQ(plan_pull({one.get(), &of_one, sources, nullptr}, {}).error().code(),
            ErrorCode::kInvalid);
  EXPECT_EQ(plan_pull({one.get(), &of_two, {}, nullptr}, {}).error().code(), ErrorCode::kInvalid);
  const TileSet wrong(7);
  EXPECT_EQ(plan_pull({one.get(), &of_one, {}, &wrong}, {}).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(plan_pull({nullptr, &of_one, {}, nullptr}, {}).error().code(), ErrorCode::kInvalid);
  const std::vector<SourceView> many(transport::kMaxSources + 1, SourceView{&of_one, nullptr});
  EXPECT_EQ(plan_pull({one.get(), &of_one, many, nullptr}, {}).error().code(), ErrorCode::kInvalid);
  PlanOptions zero;
  zero.slice_bytes = 0;
  EXPECT_EQ(plan_pull({one.get(), &of_one, {}, nullptr}, zero).error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::planner::testing
