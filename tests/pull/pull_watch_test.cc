#include "recovery/pull/pull_watch.h"

#include <gtest/gtest.h>

namespace rekindle::pull {
namespace {

TEST(Placing, ThePullWaitsForWritersAndThenAdmitsNone) {
  Placing placing;
  EXPECT_FALSE(placing.busy());
  auto one = placing.begin();
  auto two = placing.begin();
  ASSERT_TRUE(one && two);
  placing.landed({{3, 5}});
  one.reset();
  EXPECT_TRUE(placing.busy());
  placing.landed({{7, 8}});
  two.reset();
  EXPECT_FALSE(placing.busy());
  EXPECT_EQ(placing.close(), (Placing::TileRuns{{3, 5}, {7, 8}}));
  EXPECT_FALSE(placing.begin());
}

}  // namespace
}  // namespace rekindle::pull
