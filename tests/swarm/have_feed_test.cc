#include "recovery/swarm/have_feed.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace rekindle::swarm {
namespace {

using namespace std::chrono_literals;

TileSet tiles(TileIndex size, const TileRuns& runs) {
  TileSet set(size);
  for (const auto& [begin, end] : runs) set.set_range(begin, end);
  return set;
}

TEST(HaveFeed, TellsAllOnceThenOnlyWhatIsNewAtMostTenTimesASecond) {
  HaveFeed feed;
  TimePoint now{1s};
  auto update = feed.next(tiles(200, {{3, 5}}), now);
  ASSERT_TRUE(update);
  EXPECT_TRUE(update->all);
  EXPECT_EQ(update->held, (TileRuns{{3, 5}}));
  EXPECT_FALSE(feed.next(tiles(200, {{3, 9}}), now += 99ms));
  update = feed.next(tiles(200, {{3, 9}, {130, 131}}), now += 1ms);
  ASSERT_TRUE(update);
  EXPECT_FALSE(update->all);
  EXPECT_EQ(update->held, (TileRuns{{5, 9}, {130, 131}}));
  EXPECT_FALSE(feed.next(tiles(200, {{3, 9}, {130, 131}}), now += 500ms));
}

TEST(HaveFeed, ACopyThatHoldsNothingYetSaysSo) {
  HaveFeed feed;
  const auto update = feed.next(TileSet(64), TimePoint{1s});
  ASSERT_TRUE(update);
  EXPECT_TRUE(update->all);
  EXPECT_TRUE(update->held.empty());
}

// Any events may be dropped by a slow connection.
TEST(HaveFeed, WhoMissesUpdatesKnowsAllAgainWithinSeconds) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  HaveFeed feed;
  TileSet held(1000);
  TileSet heard(1000);
  TimePoint now{1s};
  const auto step = [&](bool dropped) {
    const auto update = feed.next(held, now);
    if (!update || dropped) return;
    for (const auto& [begin, end] : update->held) heard.set_range(begin, end);
  };
  for (int i = 0; i < 300; ++i, now += 100ms) {
    for (int n = 0; n < 3; ++n) held.set(static_cast<TileIndex>(random() % 1000));
    step(random() % 2 == 0);
  }
  for (int i = 0; i <= 100; ++i, now += 100ms) step(false);  // no news, one repetition at least
  EXPECT_EQ(heard.ranges(), held.ranges());
}

TEST(AnnouncePolicy, TheFirstTileIsWorthItAtOnceAndThenOnlyMuchOrLateNews) {
  AnnouncePolicy policy;
  TimePoint now{1s};
  EXPECT_FALSE(policy.due(0, 3200, now));
  EXPECT_TRUE(policy.due(1, 3200, now));
  EXPECT_FALSE(policy.due(1000, 3200, now += 999ms));
  EXPECT_TRUE(policy.due(1000, 3200, now += 1ms));
  EXPECT_FALSE(policy.due(1099, 3200, now += 1s));  // less than a thirty-second part
  EXPECT_TRUE(policy.due(1100, 3200, now += 1s));
  EXPECT_FALSE(policy.due(1101, 3200, now += 4999ms));
  EXPECT_TRUE(policy.due(1101, 3200, now += 1ms));
  EXPECT_FALSE(policy.due(1101, 3200, now += 60s));
}

TEST(Summarize, KeepsTheLongestRunsInOrder) {
  const TileRuns runs = {{0, 1}, {5, 9}, {10, 12}, {20, 30}, {40, 41}};
  EXPECT_EQ(summarize(runs, 5), runs);
  EXPECT_EQ(summarize(runs, 3), (TileRuns{{5, 9}, {10, 12}, {20, 30}}));
  EXPECT_EQ(summarize(runs, 1), (TileRuns{{20, 30}}));
  EXPECT_TRUE(summarize(runs, 0).empty());
}

TEST(HeldTiles, CountsEachTileOnce) {
  HeldTiles held(tiles(100, {{10, 20}}));
  EXPECT_EQ(held.count(), 10u);
  held.set(15);
  held.set(99);
  EXPECT_EQ(held.count(), 11u);
  EXPECT_TRUE(held.test_range(10, 20));
  EXPECT_FALSE(held.test_range(10, 21));
  EXPECT_FALSE(held.test(100));  // there is no such tile
  EXPECT_EQ(held.snapshot().count(), 11u);
}

}  // namespace
}  // namespace rekindle::swarm
