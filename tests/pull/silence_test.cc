#include "recovery/pull/silence.h"

#include <gtest/gtest.h>

namespace rekindle::pull {
namespace {

using namespace std::chrono_literals;

const TimePoint kStart{1h};

TEST(Silence, EndsItsPatienceAfterTheLastByte) {
  Silence silence(4000ms, kStart);
  EXPECT_FALSE(silence.over(kStart + 3999ms));
  EXPECT_TRUE(silence.over(kStart + 4000ms));
  silence.heard(kStart + 3s);
  EXPECT_FALSE(silence.over(kStart + 4000ms));
  EXPECT_EQ(silence.left(kStart + 4s), 3000ms);
  EXPECT_TRUE(silence.over(kStart + 7s));
}

TEST(Silence, AnOlderByteDoesNotSetItBack) {
  Silence silence(4000ms, kStart);
  silence.heard(kStart + 2s);
  silence.heard(TimePoint{});  // the engine: no byte yet
  EXPECT_EQ(silence.left(kStart + 2s), 4000ms);
}

TEST(Silence, AStepGetsTheTimeThatItWantsOrTheRest) {
  const Silence silence(4000ms, kStart);
  EXPECT_EQ(silence.at_most(1500ms, kStart), 1500ms);
  EXPECT_EQ(silence.at_most(1500ms, kStart + 3200ms), 800ms);
  EXPECT_EQ(silence.at_most(1500ms, kStart + 9s), 1ms);  // a deadline, not "none"
}

TEST(Silence, APauseOfThePullerDoesNotCount) {
  Silence silence(4000ms, kStart);
  silence.forgive(60s);
  EXPECT_FALSE(silence.over(kStart + 61s));
}

}  // namespace
}  // namespace rekindle::pull
