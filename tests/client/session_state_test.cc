#include "src/client/session_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/bucket/sample.h"

namespace rekindle::client {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using State = CallState;

class SessionStateTest : public ::testing::Test {
 protected:
  SessionState make(bool for_device = false) const {
    AttachedReply attached;
    attached.id = {"m", 3};
    attached.rung = "peers";
    SessionState state(std::move(attached), for_device);
    state.describe(sample_.contents());
    return state;
  }
  static AgentMessage event(Reply reply) {
    AgentMessage message;
    message.reply = std::move(reply);
    return message;
  }
  static AgentMessage answer(std::uint64_t call, Reply reply) {
    AgentMessage message = event(std::move(reply));
    message.call = call;
    return message;
  }
  static AgentMessage refusal(std::uint64_t call, Error error) {
    AgentMessage message;
    message.call = call;
    message.error = std::move(error);
    return message;
  }

  const bucket::testing::Sample sample_ =
      bucket::testing::sample_of({{"a", DType::kF32, Shape{16}}, {"b", DType::kF32, Shape{16}}}, 1);
};

TEST_F(SessionStateTest, PiecesCompleteInTheOrderOfTheirTiles) {
  auto state = make();
  EXPECT_THAT(state.complete(), IsEmpty());
  EXPECT_STREQ(state.rung(), "peers");
  state.apply(event(TilesReady{{{1, 2}}, false, "fallback"}));
  EXPECT_THAT(state.complete(), ElementsAre(1));
  EXPECT_STREQ(state.rung(), "fallback");
  state.handed_out(1);
  EXPECT_THAT(state.complete(), IsEmpty());
  state.apply(event(TilesReady{{}, true, ""}));
  EXPECT_THAT(state.complete(), ElementsAre(0));
  EXPECT_STREQ(state.rung(), "fallback");
  EXPECT_TRUE(state.take_verified().ready.empty()) << "there is no device";
}

TEST_F(SessionStateTest, TilesForADeviceAreCollectedUntilTheyAreTaken) {
  auto state = make(true);
  state.apply(event(TilesReady{{{0, 1}}, false, ""}));
  state.apply(event(TilesReady{{{1, 2}}, true, ""}));
  const auto verified = state.take_verified();
  EXPECT_THAT(verified.ready, ElementsAre(std::pair(0u, 1u), std::pair(1u, 2u)));
  EXPECT_TRUE(verified.all);
  EXPECT_FALSE(state.take_verified().all);
}

TEST_F(SessionStateTest, TilesThatAreReportedBeforeTheTensorsCountLater) {
  AttachedReply attached;
  attached.ready = {{0, 1}};
  SessionState state(std::move(attached), true);
  state.apply(event(TilesReady{{{1, 2}}, false, ""}));
  EXPECT_FALSE(state.is_described());
  EXPECT_THAT(state.complete(), IsEmpty());
  state.describe(sample_.contents());
  EXPECT_THAT(state.complete(), ElementsAre(0, 1));
  EXPECT_THAT(state.take_verified().ready, ElementsAre(std::pair(0u, 1u), std::pair(1u, 2u)));
}

TEST_F(SessionStateTest, TilesThatDoNotExistEndTheSession) {
  auto state = make();
  state.apply(event(TilesReady{{{7, 9}}, false, ""}));
  EXPECT_FALSE(state.check_alive());
}

TEST_F(SessionStateTest, TheFirstErrorOfTheAgentEndsTheSession) {
  auto state = make();
  state.apply(refusal(0, Error(ErrorCode::kStale, "retired")));
  state.apply(refusal(0, Error(ErrorCode::kInternal, "later")));
  EXPECT_EQ(state.check_alive().error().message(), "retired");
}

TEST_F(SessionStateTest, ACommitIsAnsweredByItsCallOrByAnEvent) {
  auto state = make();
  state.commit.asked(4);
  state.apply(answer(5, CommittedReply{{"m", 3}}));
  EXPECT_EQ(state.commit.state(), State::kAsked);
  state.apply(answer(4, CommittedReply{{"m", 3}}));
  EXPECT_EQ(state.commit.state(), State::kAnswered);
  auto other = make();
  other.apply(event(CommittedReply{{"m", 3}}));
  other.commit.asked(4);
  EXPECT_EQ(other.commit.state(), State::kAnswered);
}

TEST_F(SessionStateTest, ARefusalIsReportedOnceAndThenAskedAgain) {
  auto state = make();
  state.commit.asked(4);
  state.apply(refusal(4, Error(ErrorCode::kUnavailable, "rank 1 died")));
  ASSERT_EQ(state.commit.state(), State::kRefused);
  EXPECT_TRUE(state.commit.is_decided());
  EXPECT_EQ(state.commit.take_refusal().message(), "rank 1 died");
  EXPECT_EQ(state.commit.state(), State::kUnasked);
  EXPECT_TRUE(state.check_alive());
}

TEST_F(SessionStateTest, ANewerVersionAnswersTheWatch) {
  auto state = make();
  state.update.asked(6);
  state.apply(answer(6, NewVersion{{"m", 4}}));
  EXPECT_EQ(state.update.state(), State::kAnswered);
  EXPECT_EQ(state.update.answer().id.version, 4u);
  state.apply(event(NewVersion{{"m", 5}}));
  EXPECT_EQ(state.update.answer().id.version, 5u);
}

}  // namespace
}  // namespace rekindle::client
