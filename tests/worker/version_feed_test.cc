#include "recovery/worker/version_feed.h"

#include <gtest/gtest.h>

namespace rekindle::worker {
namespace {

using bucket::KeptTiles;

TEST(KeptParts, OfOneDeviceWholeTilesAreWholeAtOnce) {
  KeptParts parts(10);
  const std::vector<KeptTiles> kept{{0, 3, 1, 1}, {3, 4, 1, 2}, {4, 5, 2, 2}, {5, 6, 3, 3}};
  EXPECT_EQ(parts.add("c", kept), (TileRuns{{0, 3}, {4, 6}}));
}

TEST(KeptParts, OfSeveralDevicesTheLastPartMakesATileWhole) {
  KeptParts parts(10);
  EXPECT_EQ(parts.add("c", std::vector<KeptTiles>{{2, 6, 1, 3}}), TileRuns{});
  EXPECT_EQ(parts.add("c", std::vector<KeptTiles>{{3, 5, 1, 3}, {5, 6, 2, 3}}), (TileRuns{{5, 6}}));
  EXPECT_EQ(parts.add("c", std::vector<KeptTiles>{{3, 6, 1, 3}}), (TileRuns{{3, 5}}));
}

TEST(KeptParts, PartiesAreApart) {
  KeptParts parts(10);
  EXPECT_EQ(parts.add("c", std::vector<KeptTiles>{{2, 3, 1, 2}}), TileRuns{});
  EXPECT_EQ(parts.add("d", std::vector<KeptTiles>{{2, 3, 1, 2}}), TileRuns{});
  EXPECT_EQ(parts.add("d", std::vector<KeptTiles>{{2, 3, 1, 2}}), (TileRuns{{2, 3}}));
}

TEST(KeptParts, TilesBeyondTheLastAndRunsOfNothingAreNone) {
  KeptParts parts(10);
  const std::vector<KeptTiles> kept{{1, 1, 1, 1}, {2, 3, 0, 0}, {8, 4'000'000'000, 2, 2}};
  EXPECT_EQ(parts.add("c", kept), (TileRuns{{8, 10}}));
}

}  // namespace
}  // namespace rekindle::worker
