#include "recovery/coordinator/core/round_place.h"

#include <gtest/gtest.h>

// A place of a round, and the communicators, each by itself.
namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;

const ModelVersion kVersion{"m", 2};
constexpr Digest kRoot{2, 7};
constexpr RoundId kRound = 5;

class RoundPlaceTest : public ::testing::Test {
 protected:
  RoundPlaceTest() {
    member_.session = 1;
    member_.instance = "i";
    member_.id = kVersion;
    member_.state = RoundMemberState::kJoined;
    member_.round = kRound;
    member_.root = kRoot;
    member_.device = "GPU-1";
    place_ = RoundPlace("a", {}, member_);
  }
  void gather() { place_.gather(&member_, "life 1", kVersion); }
  void end_gathering() { place_.end_gathering(kVersion, kRoot, 5s); }
  bool watch(RoundMemberState state) {
    member_.state = state;
    return place_.watch(&member_, kRound);
  }
  RoundMember member_;
  RoundPlace place_;
};

TEST_F(RoundPlaceTest, ARankMayComeAndGoDuringTheGathering) {
  EXPECT_EQ(place_.state, PlaceState::kExpected);
  EXPECT_TRUE(place_.gather(&member_, "life 1", kVersion));
  EXPECT_EQ(place_.state, PlaceState::kArrived);
  EXPECT_FALSE(place_.gather(&member_, "life 1", kVersion)) << "no news";
  EXPECT_TRUE(place_.gather(nullptr, "life 1", kVersion));
  EXPECT_EQ(place_.state, PlaceState::kExpected);
  end_gathering();
  EXPECT_EQ(place_.state, PlaceState::kLeftOut);
  EXPECT_EQ(place_.why, "has not attached to m@2 in 5000 ms");
  EXPECT_FALSE(watch(RoundMemberState::kReady)) << "it stays left out";
}

TEST_F(RoundPlaceTest, ARankThatHasTheVersionIsReadyAtOnce) {
  member_.state = RoundMemberState::kServing;
  gather();
  end_gathering();
  EXPECT_TRUE(place_.ready());
  place_.lose("the node died");
  EXPECT_TRUE(place_.ready()) << "whatever becomes of it";
}

TEST_F(RoundPlaceTest, AnotherRootFails) {
  member_.root = {9, 9};
  gather();
  end_gathering();
  EXPECT_EQ(place_.state, PlaceState::kFailed);
  EXPECT_EQ(place_.aside, place_.why);
}

TEST_F(RoundPlaceTest, GoesFromSpreadingToReady) {
  gather();
  end_gathering();
  EXPECT_FALSE(watch(RoundMemberState::kJoined)) << "no news";
  EXPECT_TRUE(watch(RoundMemberState::kSpreading));
  EXPECT_EQ(place_.transfer, Transfer::kSpreading);
  EXPECT_TRUE(watch(RoundMemberState::kFilled));
  EXPECT_TRUE(place_.filled());
  EXPECT_FALSE(place_.settled());
  watch(RoundMemberState::kReady);
  EXPECT_TRUE(place_.ready());
  EXPECT_TRUE(place_.filled());
}

TEST_F(RoundPlaceTest, ALostWorkerIsTroubleOnlyBeforeItsDeviceSpreads) {
  gather();
  end_gathering();
  member_.worker_lost = true;
  watch(RoundMemberState::kJoined);
  EXPECT_EQ(place_.why, "its worker has gone");
  RoundPlace early = place_;
  early.watch_device(kRound, true);
  EXPECT_EQ(early.trouble, "its worker has gone");
  watch(RoundMemberState::kSpreading);
  place_.watch_device(kRound, true);
  EXPECT_EQ(place_.trouble, "") << "the device goes on and discards";
  place_.watch_device(kRound, false);
  EXPECT_EQ(place_.trouble, "its device process has ended");
}

TEST_F(RoundPlaceTest, AnEndedSessionFails) {
  gather();
  end_gathering();
  EXPECT_TRUE(place_.watch(nullptr, kRound));
  EXPECT_TRUE(place_.gone);
  EXPECT_EQ(place_.why, "its session has ended");
  EXPECT_FALSE(watch(RoundMemberState::kReady)) << "it does not come back";
}

TEST_F(RoundPlaceTest, DevicesThatKeepTheirCommunicatorUseItAgain) {
  Communicators communicators;
  gather();
  const std::vector<const RoundPlace*> places{&place_};
  const auto [name, reused] = communicators.name_for(places, 3);
  EXPECT_EQ(name, "3-1");
  EXPECT_FALSE(reused);
  EXPECT_EQ(communicators.name_for(places, 3).first, "3-2") << "the device has not kept it";
  member_.communicators = {name};
  gather();
  EXPECT_EQ(communicators.name_for(places, 3), (std::pair<std::string, bool>(name, true)));
  communicators.forget(name);
  EXPECT_FALSE(communicators.name_for(places, 3).second);
}

}  // namespace
}  // namespace rekindle::coordinator
