#include "recovery/pull/pull_rounds.h"

#include <gtest/gtest.h>

namespace rekindle::pull {
namespace {

using After = PullRounds::After;
using Next = PullRounds::Next;
using Search = PullRounds::Search;

TEST(PullRounds, APlanWithNothingInItIsTheEnd) { EXPECT_EQ(PullRounds::next({}), Next::kDone); }

TEST(PullRounds, MissingBoxesAreLookedForBeforeCompleteSourcesAreRead) {
  EXPECT_EQ(PullRounds::next({.has_slices = true}), Next::kTransfer);
  EXPECT_EQ(PullRounds::next({.has_missing = true}), Next::kFindSources);
  EXPECT_EQ(PullRounds::next({.has_slices = true, .has_missing = true}), Next::kFindSources);
}

TEST(PullRounds, FromGrowingSourcesAPartIsReadFirst) {
  EXPECT_EQ(PullRounds::next({.has_slices = true, .has_missing = true, .any_growing = true}),
            Next::kTransfer);
  EXPECT_EQ(PullRounds::next({.has_slices = true, .any_growing = true, .nothing_readable = true}),
            Next::kFindSources);
  EXPECT_EQ(PullRounds::next({.has_missing = true, .any_growing = true}), Next::kFindSources);
}

TEST(PullRounds, TheFallbackIsReadWhenNoSourceIsWorthWaitingFor) {
  EXPECT_EQ(PullRounds::search({.has_fallback = true}), Search::kReadFallback);
  EXPECT_EQ(PullRounds::search({.has_fallback = true, .worth_waiting = true}), Search::kAskAgain);
  EXPECT_EQ(PullRounds::search({.has_fallback = true, .worth_waiting = true, .silent = true}),
            Search::kReadFallback);
}

TEST(PullRounds, WithoutAFallbackTheSearchEndsWithTheSilence) {
  EXPECT_EQ(PullRounds::search({}), Search::kAskAgain);
  EXPECT_EQ(PullRounds::search({.worth_waiting = true, .silent = true}), Search::kGiveUp);
}

TEST(PullRounds, TheFifthTransferInARowThatGainsNothingIsTheLast) {
  PullRounds rounds;
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rounds.after({}), After::kGoOn) << i;
  EXPECT_EQ(rounds.after({.gained = true}), After::kGoOn);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rounds.after({}), After::kGoOn) << i;
  EXPECT_EQ(rounds.after({}), After::kStop);
}

TEST(PullRounds, TransfersWithoutAGrantDoNotCountUntilTheSilenceIsOver) {
  PullRounds rounds;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(rounds.after({.grants_refused = true}), After::kAwaitGrants);
  }
  for (int i = 0; i < 4; ++i) (void)rounds.after({.grants_refused = true, .silent = true});
  EXPECT_EQ(rounds.after({.grants_refused = true, .silent = true}), After::kStop);
}

}  // namespace
}  // namespace rekindle::pull
