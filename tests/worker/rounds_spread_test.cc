// Members of a round from their meeting on: what they say, and what follows from the coordinator's
// orders and from what fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/worker/rounds_fixture.h"

namespace rekindle::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(RoundsTest, AMeetingIdIsMadeOnceAndToldUntilTheyMeet) {
  gathered();
  party(proto::PARTY_MEETING).set_make_id(true);
  obey();
  obey();
  ASSERT_THAT(effects_.ids, ElementsAre(1));
  EXPECT_EQ(report().ids_size(), 0);
  rounds_.meeting_id(1, std::string("meet here"));
  ASSERT_TRUE(rounds_.due());
  const auto said = report();
  ASSERT_EQ(said.ids_size(), 1);
  EXPECT_EQ(said.ids(0).round(), kRound);
  EXPECT_EQ(said.ids(0).party(), 1u);
  EXPECT_EQ(said.ids(0).id(), "meet here");
  party(proto::PARTY_SPREADING);
  obey();
  EXPECT_EQ(report().ids_size(), 0);
}

TEST_F(RoundsTest, WhyThereIsNoMeetingIdIsTold) {
  gathered();
  party(proto::PARTY_MEETING).set_make_id(true);
  obey();
  rounds_.meeting_id(1, fail(ErrorCode::kNotFound, "this build has no NCCL"));
  EXPECT_EQ(report().ids(0).problem(), "this build has no NCCL");
}

TEST_F(RoundsTest, ItSpreadsOnceAsOrderedAndIsFilled) {
  spreading();
  const auto& order = effects_.spreads.front();
  EXPECT_EQ(order.session, 1u);
  EXPECT_EQ(order.communicator, "1-1");
  EXPECT_EQ(order.id, "meet here");
  EXPECT_EQ(order.rank, 1u);
  EXPECT_EQ(order.ranks, 3u);
  EXPECT_EQ(order.bucket_bytes, 64u);
  EXPECT_THAT(order.owners, ElementsAre(0, 2));
  EXPECT_EQ(member().state(), proto::ROUND_SPREADING);
  EXPECT_EQ(rounds_.phase_of(1), "spreading");
  obey();
  EXPECT_EQ(effects_.spreads.size(), 1u);
  rounds_.progress(1, 700);
  ASSERT_TRUE(rounds_.due());
  EXPECT_EQ(*rounds_.due(), now_ + 200ms) << "at most five times a second";
  EXPECT_EQ(member().spread_bytes(), 700u);
  rounds_.spread_over(over(), now_);
  EXPECT_EQ(member().state(), proto::ROUND_FILLED);
  EXPECT_EQ(member().spread_bytes(), 5000u);
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_TRUE(effects_.left[0].all);
  rounds_.commit(1);
  EXPECT_EQ(member().state(), proto::ROUND_READY);
  orders_.clear_rounds();
  obey();
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
  EXPECT_EQ(member().round(), 0u);
}

TEST_F(RoundsTest, WhatWasReadyBeforeTheRoundWasOverIsReadyAfterIt) {
  spreading();
  rounds_.commit(1);  // its word overtook the device process'
  EXPECT_EQ(member().state(), proto::ROUND_SPREADING);
  rounds_.device_over({.session = 1}, now_);
  EXPECT_EQ(member().state(), proto::ROUND_READY);
  EXPECT_EQ(member().spread_bytes(), 5000u);
}

TEST_F(RoundsTest, ASpreadThatFailsLeavesItAloneUntilItIsFilledOtherwise) {
  spreading();
  rounds_.progress(1, 700);
  rounds_.spread_over(over(Error(ErrorCode::kTimeout, "no progress")), now_);
  EXPECT_EQ(member().state(), proto::ROUND_ALONE);
  EXPECT_EQ(member().why(), "no progress");
  EXPECT_EQ(member().spread_bytes(), 700u);
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_FALSE(effects_.left[0].all);
  rounds_.device_over({.session = 1}, now_);
  EXPECT_EQ(member().state(), proto::ROUND_FILLED);
  EXPECT_EQ(member().spread_bytes(), 700u) << "the rest was no broadcast";
  EXPECT_TRUE(effects_.left.back().all);
}

TEST_F(RoundsTest, APartyThatIsStoppedIsStoppedHereOnce) {
  spreading();
  party(proto::PARTY_STOPPED);
  obey();
  obey();
  ASSERT_EQ(effects_.stops.size(), 1u);
  EXPECT_EQ(effects_.stops[0].second, "rank 0 of i on b: died");
  EXPECT_EQ(member().state(), proto::ROUND_ALONE);
  ASSERT_EQ(effects_.left.size(), 1u);
  rounds_.spread_over(over(Error(ErrorCode::kStale, "stopped")), now_);
  EXPECT_EQ(effects_.left.size(), 1u);
}

TEST_F(RoundsTest, OneThatWasDoneWhenItsPartyWasStoppedIsFilled) {
  spreading();
  party(proto::PARTY_STOPPED);
  obey();
  rounds_.spread_over(over(), now_);
  EXPECT_EQ(member().state(), proto::ROUND_FILLED);
}

TEST_F(RoundsTest, WhoIsInNoPartyGoesOnAloneOnceTheCoordinatorHasHeardOfIt) {
  order();
  obey();
  attach();
  joined();
  orders_.mutable_rounds(0)->set_gathering(false);
  obey(1);  // the answer to an earlier report
  EXPECT_THAT(effects_.stops, IsEmpty());
  obey();
  EXPECT_THAT(effects_.stops, ElementsAre(::testing::Key(1)));
  EXPECT_EQ(member().state(), proto::ROUND_ALONE);
}

TEST_F(RoundsTest, ARoundThatIsGoneReleasesWhoWaitsAndNotWhoSpreads) {
  gathered();
  orders_.clear_rounds();
  obey();
  EXPECT_THAT(effects_.stops, ElementsAre(::testing::Key(1)));
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
  EXPECT_EQ(member().id().version(), 2u);
}

TEST_F(RoundsTest, WhatSpreadsEndsWithoutACoordinator) {
  spreading();
  orders_.clear_rounds();
  obey();
  EXPECT_THAT(effects_.stops, IsEmpty());
  EXPECT_EQ(member().state(), proto::ROUND_SPREADING);
  rounds_.spread_over(over(), now_);
  EXPECT_TRUE(effects_.left.back().all);
  obey();
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
}

TEST_F(RoundsTest, ASilentCoordinatorIsNotWaitedForLongerThanItsTime) {
  gathered();
  (void)report();
  rounds_.unanswered();
  rounds_.check(now_ + 9999ms);
  EXPECT_THAT(effects_.stops, IsEmpty());
  rounds_.check(now_ + 10s);
  ASSERT_THAT(effects_.stops, ElementsAre(::testing::Key(1)));
  EXPECT_THAT(effects_.stops[0].second, HasSubstr("does not answer"));
  EXPECT_FALSE(rounds_.gathers("m", "g"));
}

TEST_F(RoundsTest, OneThatJoinsARoundThatIsOverIsReleasedAtOnce) {
  order();
  obey();
  attach();
  EXPECT_TRUE(rounds_.enters(1));
  rounds_.hand_over(1, {1, 2}, std::nullopt);
  orders_.clear_rounds();
  obey();
  rounds_.joined({1, 64, {3, 4}, 5000, {}}, false);
  EXPECT_THAT(effects_.stops, ElementsAre(::testing::Key(1)));
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
}

TEST_F(RoundsTest, Row39AWorkerThatDiesAmidTheSpreadIsAMemberUntilItsDeviceIsDone) {
  spreading();
  rounds_.fail(1, "died (pid 7)", now_);
  auto said = member();
  EXPECT_EQ(said.state(), proto::ROUND_SPREADING);
  EXPECT_TRUE(said.worker_lost());
  rounds_.check(now_ + 6s);
  EXPECT_EQ(member().session(), 1u);
  rounds_.spread_over(over(), now_);
  said = member();
  EXPECT_EQ(said.state(), proto::ROUND_FAILED);
  EXPECT_EQ(said.why(), "died (pid 7)");
  EXPECT_TRUE(said.worker_lost()) << "its party is none that failed";
  EXPECT_THAT(effects_.left, IsEmpty()) << "there is no session";
  rounds_.check(now_ + 5s);
  EXPECT_FALSE(rounds_.has_members());
}

TEST_F(RoundsTest, Row39WhatItsDeviceDiscardsWasNotGivenByBroadcast) {
  spreading();
  rounds_.progress(1, 700);
  rounds_.fail(1, "died (pid 7)", now_);
  auto discarded = over();
  discarded.bytes = 900;
  discarded.worker_lost = Error(ErrorCode::kPeerLost, "it has gone");
  rounds_.spread_over(discarded, now_);
  EXPECT_EQ(member().spread_bytes(), 900u);
  EXPECT_TRUE(member().worker_lost()) << "its party is none that failed";
}

TEST_F(RoundsTest, Row40AWorkerThatItsDeviceHasDoneWithoutIsNotFilled) {
  spreading();
  auto discarded = over();
  discarded.bytes = 900;
  discarded.worker_lost = Error(ErrorCode::kTimeout, "it hangs");
  rounds_.spread_over(discarded, now_);
  const auto said = member();
  EXPECT_EQ(said.state(), proto::ROUND_FAILED);
  EXPECT_TRUE(said.worker_lost()) << "its party is none that failed";
  EXPECT_EQ(said.why(), "it hangs");
  EXPECT_EQ(said.spread_bytes(), 900u);
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_FALSE(effects_.left[0].all) << "what it lacks comes from the copy here";
  rounds_.device_over({.session = 1, .error = Error(ErrorCode::kTimeout, "it hangs")}, now_);
  EXPECT_EQ(effects_.left.size(), 1u);
  orders_.clear_rounds();
  obey();
  EXPECT_EQ(member().state(), proto::ROUND_SERVING) << "its session may yet load by itself";
  EXPECT_FALSE(member().worker_lost());
}

TEST_F(RoundsTest, Row39ItsDeviceIsStoppedWithItsParty) {
  spreading();
  rounds_.fail(1, "died (pid 7)", now_);
  party(proto::PARTY_STOPPED);
  obey();
  EXPECT_EQ(effects_.stops.size(), 1u);
  EXPECT_EQ(member().state(), proto::ROUND_FAILED);
  EXPECT_FALSE(member().worker_lost());
}

TEST_F(RoundsTest, Row38ADeviceProcessThatDiesLeavesItsMembersAlone) {
  spreading();
  rounds_.device_over({.session = 1, .error = Error(ErrorCode::kPeerLost, "it died")}, now_);
  EXPECT_EQ(member().state(), proto::ROUND_ALONE);
  EXPECT_EQ(member().why(), "it died");
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_FALSE(effects_.left[0].all);
}

TEST_F(RoundsTest, OneThatFailsBeforeItsPartyBeginsHasFailedForAWhile) {
  gathered();
  rounds_.fail(1, "hangs", now_);
  const auto said = member();
  EXPECT_EQ(said.state(), proto::ROUND_FAILED);
  EXPECT_EQ(said.round(), kRound);
  EXPECT_FALSE(said.worker_lost());
  rounds_.check(now_ + 4999ms);
  EXPECT_TRUE(rounds_.has_members());
  rounds_.check(now_ + 5s);
  EXPECT_FALSE(rounds_.has_members());
}

TEST_F(RoundsTest, AnOlderAnswerThatComesLateChangesNothing) {
  attach(1, 1);
  const auto first = report();
  const auto second = report();
  order();
  orders_.set_revision(7);
  rounds_.obey(orders_, second.sequence(), now_);
  proto::RoundOrders none;
  none.set_revision(6);
  rounds_.obey(none, first.sequence(), now_);
  EXPECT_TRUE(rounds_.gathers("m", "g"));
  rounds_.unanswered();
  none.set_revision(1);  // another coordinator
  rounds_.obey(none, report().sequence(), now_);
  EXPECT_FALSE(rounds_.gathers("m", "g"));
}

TEST_F(RoundsTest, OrdersForStrangersAndNonsenseDoNothing) {
  gathered();
  party(proto::PARTY_SPREADING, 77);
  auto& broken = *orders_.add_rounds();
  broken.set_round(kRound + 5);
  broken.set_gathering(true);
  obey();
  EXPECT_THAT(effects_.spreads, IsEmpty());
  EXPECT_EQ(rounds_.gathers("m", "g"), std::nullopt);
}

TEST_F(RoundsTest, RanksHereWithoutACopyShareOutWhatTheyKeepInTheOrderOfRanks) {
  order();
  obey();
  for (const SessionId session : {1u, 2u, 3u}) {
    attach(session);
    joined(session, session == 2);
  }
  obey();
  auto& spread = party(proto::PARTY_SPREADING, 1);
  spread.mutable_members(0)->set_rank(2);
  for (const SessionId session : {2u, 3u}) {
    auto& place = *spread.add_members();
    place.set_session(session);
    place.set_rank(session == 2 ? 0 : 1);
  }
  obey();
  ASSERT_EQ(effects_.spreads.size(), 3u);
  for (const auto& ordered : effects_.spreads) {
    if (ordered.session == 2) {
      EXPECT_EQ(ordered.keep_count, 0u) << "it has all of it";
      continue;
    }
    EXPECT_EQ(ordered.keep_count, 2u);
    EXPECT_EQ(ordered.keep_index, ordered.session == 3 ? 0u : 1u);
  }
}

TEST_F(RoundsTest, WhatWasKeptIsReported) {
  spreading();
  auto said = over();
  said.kept_bytes = 321;
  rounds_.spread_over(said, now_);
  EXPECT_EQ(member().kept_bytes(), 321u);
}

}  // namespace
}  // namespace rekindle::worker
