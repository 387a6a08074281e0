// An agent's members of broadcast rounds: who is one, what is news to it, when it joins.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"
#include "tests/worker/rounds_fixture.h"

namespace rekindle::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST_F(RoundsTest, SessionsWithoutAGroupAreNobodysMembers) {
  rounds_.attach(1, {"", "i", 0, "m", "double:0"});
  EXPECT_FALSE(rounds_.has_members());
  EXPECT_FALSE(rounds_.choose(1, {"m", 2}));
  EXPECT_FALSE(rounds_.due());
}

TEST_F(RoundsTest, AMemberIsReportedFromItsAttachToItsEnd) {
  attach(1, 1);
  EXPECT_EQ(report().members(0).id().version(), 0u) << "it serves nothing yet";
  rounds_.commit(1);
  ASSERT_TRUE(rounds_.due());
  auto said = report();
  EXPECT_FALSE(rounds_.due()) << "said";
  EXPECT_EQ(said.device_life(), "life");
  EXPECT_EQ(said.wait_ms(), 1000u);
  ASSERT_EQ(said.members_size(), 1);
  EXPECT_EQ(said.members(0).id().version(), 1u);
  EXPECT_EQ(said.members(0).group(), "g");
  EXPECT_EQ(said.members(0).state(), proto::ROUND_SERVING);
  EXPECT_EQ(said.members(0).round(), 0u);
  const auto first = said.sequence();
  rounds_.detach(1, now_);
  ASSERT_TRUE(rounds_.due()) << "one last report";
  said = report();
  EXPECT_EQ(said.members_size(), 0);
  EXPECT_EQ(said.wait_ms(), 0u);
  EXPECT_GT(said.sequence(), first);
  EXPECT_FALSE(rounds_.due());
}

TEST_F(RoundsTest, WhileARoundGathersItsVersionIsTheGroups) {
  attach(1, 3);
  EXPECT_FALSE(rounds_.gathers("m", "g"));
  order(2);
  obey();
  EXPECT_EQ(rounds_.gathers("m", "g"), 2u);
  EXPECT_FALSE(rounds_.gathers("m", "h"));
  EXPECT_FALSE(rounds_.gathers("n", "g"));
  EXPECT_FALSE(rounds_.gathers("m", "")) << "without a group";
  EXPECT_EQ(rounds_.news_for(1, {"m", 3}), 2u) << "an update may go back";
  EXPECT_FALSE(rounds_.news_for(1, {"m", 2}));
  orders_.mutable_rounds(0)->set_group("");
  obey();
  EXPECT_EQ(rounds_.gathers("m", "h"), 2u) << "a round of all groups";
  orders_.mutable_rounds(0)->set_gathering(false);
  obey();
  EXPECT_FALSE(rounds_.gathers("m", "g"));
}

TEST_F(RoundsTest, WhoWasAwayHearsOfTheGroupsLastRoundAfterwards) {
  attach(1, 1);
  attach(2, 3);
  order(2);
  obey();
  orders_.clear_rounds();
  obey();
  EXPECT_EQ(rounds_.news_for(1, {"m", 1}), 2u);
  EXPECT_FALSE(rounds_.news_for(2, {"m", 3})) << "it has a newer one";
  EXPECT_FALSE(rounds_.news_for(9, {"m", 1})) << "no member";
  auto& later = order(4, "");
  later.set_round(kRound + 1);
  later.set_gathering(false);
  obey();
  EXPECT_EQ(rounds_.news_for(1, {"m", 1}), 4u) << "the newest round counts";
}

TEST_F(RoundsTest, ASessionJoinsWhenItHasItsBucketsAndNoSooner) {
  order();
  obey();
  rounds_.attach(1, {"g", "i", 3, "m", "double:0"});
  EXPECT_TRUE(rounds_.choose(1, {"m", 2}));
  EXPECT_EQ(member().round(), 0u);
  EXPECT_EQ(member().id().version(), 0u) << "it has not arrived";
  joined(1, true);
  const auto said = member();
  EXPECT_EQ(said.state(), proto::ROUND_JOINED);
  EXPECT_EQ(said.round(), kRound);
  EXPECT_EQ(said.id().version(), 2u);
  EXPECT_EQ(said.rank(), 3u);
  EXPECT_EQ(rekindle::rpc::from_proto(said.root()).bytes[0], 1u);
  EXPECT_EQ(rekindle::rpc::from_proto(said.contents()).bytes[1], 4u);
  EXPECT_EQ(said.payload_bytes(), 5000u);
  EXPECT_EQ(said.bucket_bytes(), 64u);
  EXPECT_TRUE(said.owner());
  EXPECT_THAT(said.communicators(), ElementsAre("0-7"));
  EXPECT_EQ(rounds_.phase_of(1), "joined");
}

TEST_F(RoundsTest, AnotherVersionOrALateOneDoesNotJoin) {
  order();
  obey();
  attach(1, 1);
  EXPECT_FALSE(rounds_.enters(1));
  rounds_.attach(2, {"g", "i", 0, "m", "double:0"});
  EXPECT_TRUE(rounds_.choose(2, {"m", 2}));
  orders_.mutable_rounds(0)->set_gathering(false);
  obey();
  EXPECT_FALSE(rounds_.enters(2)) << "its copy took too long";
  rounds_.hand_over(2, {1, 2}, std::nullopt);
  EXPECT_EQ(member(2).state(), proto::ROUND_SERVING);
  EXPECT_EQ(member(2).id().version(), 0u) << "it serves nothing yet";
  rounds_.commit(2);
  EXPECT_EQ(member(2).id().version(), 2u);
  EXPECT_THAT(effects_.left, IsEmpty());
}

TEST_F(RoundsTest, ARetiredVersionIsNoNewsAnyMore) {
  attach(1, 1);
  rounds_.commit(1);
  order();
  orders_.mutable_rounds(0)->set_gathering(false);
  obey();
  EXPECT_EQ(rounds_.news_for(1, {"m", 1}), 2u);
  rounds_.retired({"m", 2});
  EXPECT_EQ(rounds_.news_for(1, {"m", 1}), std::nullopt);
}

TEST_F(RoundsTest, OrdersThatNobodyAsksForAnyMoreAreForgotten) {
  order();
  obey();
  EXPECT_EQ(rounds_.gathers("m", "g"), 2u);
  rounds_.forget_orders();
  EXPECT_EQ(rounds_.gathers("m", "g"), std::nullopt);
}

TEST_F(RoundsTest, WithoutADeviceOrItsChannelItIsAlone) {
  order();
  obey();
  rounds_.attach(1, {"g", "i1", 0, "m", ""});
  EXPECT_FALSE(rounds_.choose(1, {"m", 2})) << "nothing will bring it";
  EXPECT_FALSE(rounds_.enters(1));
  rounds_.hand_over(1, {1, 2}, "on no device");
  attach(2);
  EXPECT_TRUE(rounds_.enters(2));
  rounds_.hand_over(2, {1, 2}, "no device process");
  for (const SessionId session : {1u, 2u}) {
    EXPECT_EQ(member(session).state(), proto::ROUND_ALONE);
    EXPECT_EQ(member(session).round(), kRound);
    EXPECT_EQ(member(session).id().version(), 2u);
  }
  EXPECT_EQ(member(2).why(), "no device process");
  ASSERT_EQ(effects_.left.size(), 2u);
  EXPECT_FALSE(effects_.left[0].all);
}

TEST_F(RoundsTest, WhoDetachesToAttachToTheRoundIsStillExpected) {
  rounds_.attach(1, {"g", "i", 0, "m", "double:0"});
  (void)rounds_.choose(1, {"m", 1});
  rounds_.commit(1);
  order();
  obey();
  rounds_.detach(1, now_);
  EXPECT_EQ(member(1).id().version(), 1u);
  rounds_.attach(2, {"g", "i", 0, "m", "double:0"});
  EXPECT_TRUE(rounds_.choose(2, {"m", 2}));
  const auto said = report();
  ASSERT_EQ(said.members_size(), 1) << "its new session speaks for it";
  EXPECT_EQ(said.members(0).session(), 2u);
}

}  // namespace
}  // namespace rekindle::worker
