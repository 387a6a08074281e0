// Growing candidates, compared with a check of every tile of every slice.
#include "recovery/swarm/availability.h"

#include <algorithm>
#include <random>
#include <span>
#include <utility>

#include <gtest/gtest.h>

#include "tests/planner/random_plan.h"

namespace rekindle::swarm {
namespace {

using planner::testing::Random;

TileRuns random_runs(Random& random, TileIndex tiles) {
  TileSet set(tiles);
  for (TileIndex tile = 0; tile < tiles; ++tile) {
    if (random() % 4 == 0) set.set(tile);
  }
  return set.ranges();
}

planner::PlanRequest request_for(const planner::testing::Scenario& scenario,
                                 std::span<const planner::SourceView> sources) {
  planner::PlanRequest request;
  request.checkpoint = scenario.checkpoint.get();
  request.destination = scenario.destination.get();
  request.sources = sources;
  return request;
}

// Every element that the slice reads lies in a tile that the source holds.
bool may_serve(const planner::Plan& plan, SliceIndex slice, const Layout& layout, bool proves_parts,
               const TileSet& held) {
  std::vector<TileIndex> tiles;
  plan.tiles_read(slice, tiles);
  return plan.covered_by(slice, layout, proves_parts) &&
         std::all_of(tiles.begin(), tiles.end(), [&](TileIndex t) { return held.test(t); });
}

TEST(Availability, ASourceIsACandidateExactlyWhenItsLayoutCoversTheSliceAndItHoldsItsTiles) {
  const std::uint64_t base = std::random_device{}();
  for (std::uint64_t seed = base; seed < base + 300; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Random random(seed);
    const auto scenario = planner::testing::random_scenario(random, planner::testing::Size::kTiny);
    auto views = scenario.views();
    const auto request = request_for(scenario, views);
    const auto plan = planner::plan_pull(request, {});
    ASSERT_TRUE(plan);
    const TileIndex tile_count = scenario.checkpoint->tiles.tile_count();
    planner::Expansion expansion;
    for (SliceIndex slice = 0; slice < (*plan)->slice_count(); ++slice) {
      for (SourceIndex source = 0; source < views.size(); ++source) {
        const bool covers =
            (*plan)->covered_by(slice, *views[source].layout, views[source].proves_parts);
        EXPECT_TRUE(covers || !(*plan)->candidates(slice).test(source));
        if (!covers) continue;
        (*plan)->expand_from(slice, *views[source].layout, expansion);
        std::uint64_t bytes = 0;
        for (const auto& read : expansion.reads) bytes += read.copy.total_bytes();
        EXPECT_EQ(bytes, (*plan)->slice_bytes(slice));
      }
    }
    Availability availability(**plan, {});
    for (std::size_t i = 0; i < scenario.layouts.size(); ++i) {
      const auto source = static_cast<SourceIndex>(views.size() + i);
      const Layout& layout = *scenario.layouts[i];
      // Tables that were made beforehand change nothing.
      const bool prepared = planner::testing::chance(random, 0.5);
      const bool proves = planner::testing::chance(random, 0.5);
      if (prepared) {
        availability.prepare(join_tables(**plan, layout, proves, availability.slice_tiles()));
      }
      TileSet held(tile_count);
      std::vector<SliceIndex> gained;
      availability.add_source(source, layout, proves);
      for (int round = 0; round < 4; ++round) {
        const TileRuns runs = random_runs(random, tile_count);
        for (const auto& [begin, end] : runs) held.set_range(begin, end);
        const auto more = availability.extend(source, runs);
        gained.insert(gained.end(), more.begin(), more.end());
        for (SliceIndex slice = 0; slice < (*plan)->slice_count(); ++slice) {
          ASSERT_EQ(availability.candidates(slice).test(source),
                    may_serve(**plan, slice, layout, proves, held));
          ASSERT_EQ(availability.prospects(slice).test(source),
                    (*plan)->covered_by(slice, layout, proves));
        }
      }
      const auto rest = availability.complete(source);
      gained.insert(gained.end(), rest.begin(), rest.end());
      std::sort(gained.begin(), gained.end());
      EXPECT_EQ(std::unique(gained.begin(), gained.end()), gained.end()) << "told twice";
      for (SliceIndex slice = 0; slice < (*plan)->slice_count(); ++slice) {
        const bool covers = (*plan)->covered_by(slice, layout, proves);
        EXPECT_EQ(availability.candidates(slice).test(source), covers);
        EXPECT_EQ(std::binary_search(gained.begin(), gained.end(), slice), covers);
      }
    }
  }
}

// Keys make pullers agree on the one that asks a complete source, even when one of them has some
// tiles already and so another plan.
TEST(Availability, AKeyIsATileThatTheSliceOrItsGroupReadsWhateverThePlan) {
  const std::uint64_t base = std::random_device{}();
  for (std::uint64_t seed = base; seed < base + 100; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Random random(seed);
    const auto scenario = planner::testing::random_scenario(random, planner::testing::Size::kTiny);
    auto views = scenario.views();
    auto request = request_for(scenario, views);
    TileSet have(scenario.checkpoint->tiles.tile_count());
    for (const auto& [begin, end] : random_runs(random, have.size())) have.set_range(begin, end);
    for (const TileSet* resumed : {static_cast<const TileSet*>(nullptr), &std::as_const(have)}) {
      request.have = resumed;
      const auto plan = planner::plan_pull(request, {});
      ASSERT_TRUE(plan);
      const Availability availability(**plan, {});
      std::vector<TileIndex> read;
      for (SliceIndex slice = 0; slice < (*plan)->slice_count(); ++slice) {
        const SliceIndex first = (*plan)->group_first(slice);
        (*plan)->tiles_read(first, read);
        ASSERT_FALSE(read.empty());
        EXPECT_EQ(availability.key(slice), *std::min_element(read.begin(), read.end()));
        EXPECT_EQ(availability.key(slice), availability.key(first));
        if (resumed != nullptr && read.size() == 1) {
          EXPECT_FALSE(have.test(read[0]));
        }
      }
    }
  }
}

TEST(Availability, AGrowingSourceOfThePlanIsNoCandidateUntilItIsToldToHoldSomething) {
  Random random(7);
  const auto scenario = planner::testing::random_scenario(random, planner::testing::Size::kTiny);
  const planner::SourceView view{scenario.destination.get(), nullptr};
  const auto request = request_for(scenario, std::span(&view, 1));
  const auto plan = planner::plan_pull(request, {});
  ASSERT_TRUE(plan);
  ASSERT_TRUE((*plan)->missing().empty());
  Availability availability(**plan, SourceMask(1));
  for (SliceIndex slice = 0; slice < (*plan)->slice_count(); ++slice) {
    EXPECT_TRUE(availability.candidates(slice).empty());
  }
  EXPECT_EQ(availability.add_source(0, *scenario.destination, false), (*plan)->slice_count());
  EXPECT_EQ(availability.complete(0).size(), (*plan)->slice_count());
}

TEST(Availability, TheLastSourceThatAPullMayHaveBecomesACandidateLikeTheFirst) {
  Random random(8);
  const auto scenario = planner::testing::random_scenario(random, planner::testing::Size::kTiny);
  const planner::SourceView view{scenario.destination.get(), nullptr};
  const auto request = request_for(scenario, std::span(&view, 1));
  const auto plan = planner::plan_pull(request, {});
  ASSERT_TRUE(plan);
  Availability availability(**plan, {});
  constexpr SourceIndex kLast = transport::kMaxSources - 1;
  availability.add_source(kLast, *scenario.destination, false);
  EXPECT_TRUE(availability.prospects(0).test(kLast));
  EXPECT_FALSE(availability.candidates(0).test(kLast));
  EXPECT_EQ(availability.complete(kLast).size(), (*plan)->slice_count());
  EXPECT_TRUE(availability.candidates(0).test(kLast));
  EXPECT_TRUE(availability.candidates(0).test(0)) << "that of the plan stays";
}

TEST(Availability, WhatASourceOutsideSaysOfTilesBehindTheLastIsIgnored) {
  Random random(9);
  const auto scenario = planner::testing::random_scenario(random, planner::testing::Size::kTiny);
  const planner::SourceView view{scenario.destination.get(), nullptr};
  const auto request = request_for(scenario, std::span(&view, 1));
  const auto plan = planner::plan_pull(request, {});
  ASSERT_TRUE(plan);
  Availability availability(**plan, {});
  EXPECT_TRUE(availability.extend(5, {{0, 1}}).empty());  // never added
  availability.add_source(5, *scenario.destination, false);
  EXPECT_EQ(availability.extend(5, {{0, 4'000'000'000u}}).size(), (*plan)->slice_count());
}

TEST(SliceOrder, EachSliceOnceGroupsTogetherAndDifferentForEachPuller) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 32; ++i) {
    tensors.push_back({"w" + std::to_string(i), DType::kBF16, {4096, 1024}});
  }
  const auto checkpoint = planner::testing::make_checkpoint(std::move(tensors));
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < checkpoint->tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(checkpoint->tensors[i].shape)});
  }
  const auto packed = pack_layout(checkpoint->tensors, boxes, 1ull << 40);
  ASSERT_TRUE(packed);
  const planner::SourceView view{&packed->layout, nullptr};
  planner::PlanRequest request;
  request.checkpoint = checkpoint.get();
  request.destination = &packed->layout;
  request.sources = std::span(&view, 1);
  const auto plan = planner::plan_pull(request, {.slice_bytes = 1 << 20, .bucket_bytes = 4 << 20});
  ASSERT_TRUE(plan);
  const auto a = slice_order(**plan, order_seed(Incarnation::random()));
  const auto b = slice_order(**plan, order_seed(Incarnation::random()));
  EXPECT_NE(a, b);
  for (auto order : {a, b}) {
    for (std::size_t i = 0; i < order.size(); ++i) {
      // A group is read through once it is begun.
      if ((*plan)->group_first(order[i]) == order[i]) continue;
      ASSERT_GT(i, 0u);
      EXPECT_EQ(order[i], order[i - 1] + 1);
    }
    std::sort(order.begin(), order.end());
    ASSERT_EQ(order.size(), (*plan)->slice_count());
    for (SliceIndex i = 0; i < order.size(); ++i) ASSERT_EQ(order[i], i);
  }
}

}  // namespace
}  // namespace rekindle::swarm
