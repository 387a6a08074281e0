#include "recovery/pull/source_standing.h"

#include <gtest/gtest.h>

namespace rekindle::pull {
namespace {

using LossOfSource = SourceState::Loss;

class SourceStandingTest : public ::testing::Test {
 protected:
  const Incarnation source_ = Incarnation::random();
  SourceStanding standing_;
};

TEST_F(SourceStandingTest, APeerThatCannotBeReachedIsAskedThreeTimes) {
  standing_.failed(source_, ErrorCode::kTimeout);
  standing_.failed(source_, ErrorCode::kPeerLost);
  EXPECT_FALSE(standing_.banned(source_));
  standing_.failed(source_, ErrorCode::kUnavailable);
  EXPECT_TRUE(standing_.banned(source_));
}

TEST_F(SourceStandingTest, APeerThatAnswersNonsenseIsAskedOnce) {
  standing_.failed(source_, ErrorCode::kCorrupt);
  EXPECT_TRUE(standing_.banned(source_));
}

TEST_F(SourceStandingTest, ASourceThatDeliversMayBeLostOftenOneThatDoesNotThreeTimes) {
  for (int i = 0; i < 10; ++i) standing_.lost(source_, LossOfSource::kFailed, true);
  EXPECT_FALSE(standing_.banned(source_));
  standing_.lost(source_, LossOfSource::kFailed, false);
  standing_.lost(source_, LossOfSource::kFailed, false);
  EXPECT_TRUE(standing_.banned(source_)) << "the last loss with bytes counts as the first";
}

TEST_F(SourceStandingTest, AGrantThatRanOutIsNotTheSourcesFault) {
  for (int i = 0; i < 10; ++i) standing_.lost(source_, LossOfSource::kGrantRefused, false);
  EXPECT_FALSE(standing_.banned(source_));
}

TEST_F(SourceStandingTest, WrongSlicesAddUpOverTransfers) {
  EXPECT_FALSE(standing_.add_wrong("a", 1));
  EXPECT_FALSE(standing_.add_wrong("a", 0)) << "nothing new";
  EXPECT_FALSE(standing_.add_wrong("b", 1)) << "another source";
  EXPECT_TRUE(standing_.add_wrong("a", 1));
  standing_.lost(source_, LossOfSource::kWrongBytes, true);
  EXPECT_TRUE(standing_.banned(source_));
}

}  // namespace
}  // namespace rekindle::pull
