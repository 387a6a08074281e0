#include "recovery/pull/rail_keeper.h"

#include <chrono>
#include <initializer_list>

#include <gtest/gtest.h>

namespace rekindle::pull {
namespace {

using namespace std::chrono_literals;
using Join = RailKeeper::Join;

const TimePoint kJoined{1h};

transport::BatchProgress alive(
    std::initializer_list<std::pair<transport::SourceIndex, const char*>> paths) {
  transport::BatchProgress progress;
  for (const auto& [source, home] : paths) {
    progress.paths.push_back({.home = home, .alive = true, .source = source});
  }
  return progress;
}

TEST(RailKeeper, ARailIsLostWhileItsSourceGoesOnOverOthers) {
  RailKeeper rails;
  EXPECT_TRUE(rails.update(alive({{0, "mlx0"}, {0, "mlx1"}, {1, "mlx0"}})).empty());
  EXPECT_EQ(rails.alive(0), (std::vector<std::string>{"mlx0", "mlx1"}));
  const auto lost = rails.update(alive({{0, "mlx1"}}));
  ASSERT_EQ(lost.size(), 1u) << "source 1 is gone altogether: that is another event";
  EXPECT_EQ(lost[0].source, 0u);
  EXPECT_EQ(lost[0].rail, "mlx0");
  EXPECT_TRUE(rails.alive(1).empty());
  EXPECT_TRUE(rails.update(alive({{0, "mlx1"}})).empty()) << "told once";
}

TEST(RailKeeper, AJoinIsTriedEachSecondOneAtATime) {
  RailKeeper rails;
  EXPECT_FALSE(rails.begin_join(0, kJoined)) << "it has just been connected";
  EXPECT_FALSE(rails.begin_join(0, kJoined + 999ms));
  EXPECT_TRUE(rails.begin_join(0, kJoined + 1s));
  EXPECT_TRUE(rails.joining(0));
  EXPECT_FALSE(rails.begin_join(0, kJoined + 9s)) << "one is under way";
  rails.end_join(0, Join::kNothingMissing, kJoined + 9s);
  EXPECT_FALSE(rails.joining(0));
  EXPECT_FALSE(rails.begin_join(0, kJoined + 9999ms));
  EXPECT_TRUE(rails.begin_join(0, kJoined + 10s));
}

TEST(RailKeeper, ThePauseDoublesWhileJoinsFailAndStartsAgainAfterOneThatWorked) {
  RailKeeper rails;
  TimePoint now = kJoined;
  (void)rails.begin_join(0, now);
  now += 1s;
  for (const auto pause : {2s, 4s, 8s, 16s, 16s}) {
    ASSERT_TRUE(rails.begin_join(0, now));
    rails.end_join(0, Join::kFailed, now);
    EXPECT_FALSE(rails.begin_join(0, now + pause - 1ms));
    now += pause;
  }
  ASSERT_TRUE(rails.begin_join(0, now));
  rails.end_join(0, Join::kJoined, now);
  EXPECT_TRUE(rails.begin_join(0, now + 1s));
}

}  // namespace
}  // namespace rekindle::pull
