#include "recovery/pull/first_tiles.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "src/store/segment_store.h"
#include "tests/store/store_fixture.h"

namespace rekindle::pull {
namespace {

TEST(FirstTiles, AreThoseOfAnyListThatAreInRange) {
  const std::vector<TileRuns> lists{{{1, 3}, {6, 20}}, {{2, 4}}};
  const FirstTiles first(8, lists);
  std::vector<TileIndex> contained;
  for (TileIndex tile = 0; tile < 8; ++tile) {
    if (first.contains(tile)) contained.push_back(tile);
  }
  EXPECT_EQ(contained, (std::vector<TileIndex>{1, 2, 3, 6, 7}));
  EXPECT_EQ(first.all_but(std::nullopt).tiles(), (std::vector<TileIndex>{0, 4, 5}));
  TileSet here(8);
  here.set(2);
  EXPECT_EQ(first.all_but(here).tiles(), (std::vector<TileIndex>{0, 2, 4, 5}));
}

class FirstTilesOrder : public store::StoreTest {};

// Each slice once; the n-th tiles of all lists before the next ones of any.
TEST_F(FirstTilesOrder, TakesTheListsSideBySide) {
  const auto& all = *checkpoint();
  const TileIndex count = all.tiles.tile_count();
  ASSERT_GT(count, 5u);
  const Layout layout = store::pack(all, store::all_boxes(all)).layout;
  const planner::SourceView source{&layout};
  const TileIndex half = count / 2;
  const std::vector<TileRuns> lists{{{0, half}}, {{half, count}}};
  const FirstTiles first(count, lists);
  planner::PlanRequest request;
  request.checkpoint = &all;
  request.destination = &layout;
  request.sources = {&source, 1};
  planner::PlanOptions options;
  options.slice_bytes = 1;
  const auto plan = planner::plan_pull(request, options);
  ASSERT_TRUE(plan) << plan.error().message();
  auto order = first.order(**plan);
  std::vector<TileIndex> tiles;
  std::vector<TileIndex> places;
  for (const auto slice : order) {
    (*plan)->tiles_read(slice, tiles);
    ASSERT_FALSE(tiles.empty());
    const TileIndex tile = tiles.front();
    places.push_back(tile < half ? tile : tile - half);
  }
  EXPECT_TRUE(std::ranges::is_sorted(places));
  std::ranges::sort(order);
  ASSERT_EQ(order.size(), (*plan)->slice_count());
  for (transport::SliceIndex i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i);
}

}  // namespace
}  // namespace rekindle::pull
