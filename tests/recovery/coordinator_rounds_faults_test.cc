#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/rounds_fixture.h"

// Broadcast rounds in which something fails: each ends, and the right nodes are told.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::HasSubstr;

TEST_F(ThreeWorkers, ThatCannotMakeACommunicatorGoOnAlone) {
  const RoundId number = begin();
  all_join(number);
  reports["b"].ids = {{number, 1, "forged", ""}};
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kMeeting) << "b was not asked";
  reports["a"].ids = {{number, 1, "", "no NCCL here"}};
  ASSERT_TRUE(say("a"));
  EXPECT_EQ(order("c", number).state, PartyState::kStopped);
  EXPECT_THAT(order("c", number).why, HasSubstr("no NCCL here"));
  EXPECT_EQ(round(number).phase(), RoundPhase::kLoading);
}

TEST_F(ThreeWorkers, MeetWithinADeadline) {
  const RoundId number = begin();
  all_join(number);
  pass(9900ms);
  EXPECT_EQ(order("c", number).state, PartyState::kMeeting);
  pass(200ms);
  EXPECT_EQ(order("c", number).state, PartyState::kStopped);
  EXPECT_THAT(order("c", number).why, HasSubstr("rank 0 of ia on a"));
}

TEST_F(ThreeWorkers, Row43AFailedSpreadStopsTheOthers) {
  const RoundId number = spread();
  set("b", RoundMemberState::kAlone);
  member("b").why = "no progress for 5000 ms";
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_EQ(order("a", number).why, "rank 0 of ib on b: no progress for 5000 ms");
  EXPECT_EQ(round(number).phase(), RoundPhase::kLoading);
  everybody(RoundMemberState::kReady);
  EXPECT_TRUE(round(number).over());
  EXPECT_TRUE(place(number, "b").ready()) << "from its host";
}

TEST_F(ThreeWorkers, Row43AStoppedPartysCommunicatorIsNotUsedAgain) {
  const RoundId number = spread();
  const std::string name = round(number).parties()[0].communicator;
  set("b", RoundMemberState::kAlone);
  ASSERT_TRUE(say("b"));
  everybody(RoundMemberState::kReady);
  for (const char* node : {"a", "b", "c"}) member(node).communicators = {name};
  const RoundId next = begin_anew();
  all_join(next);
  EXPECT_NE(order("a", next).communicator, name);
}

TEST_F(ThreeWorkers, Row39AWorkersDeathDisturbsNobodyWhileItsDeviceGoesOn) {
  const RoundId number = spread();
  member("c").worker_lost = true;
  member("c").why = "the worker was killed";
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
  EXPECT_EQ(place(number, "c").why, "the worker was killed");
  set("a", RoundMemberState::kReady);
  set("b", RoundMemberState::kReady);
  say_all();
  EXPECT_EQ(round(number).phase(), RoundPhase::kSpreading) << "its device is not through";
  reports["c"].members.clear();
  say_all();
  EXPECT_TRUE(round(number).over());
  EXPECT_NE(round(number).parties()[0].state, PartyState::kStopped);
}

TEST_F(ThreeWorkers, Row39AWorkerThatDiesBeforeItsDeviceSpreadsStopsTheParty) {
  const RoundId number = begin();
  all_join(number);
  member("c").worker_lost = true;
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
}

TEST_F(ThreeWorkers, Row43ASessionThatEndsStopsTheOthers) {
  const RoundId number = spread();
  reports["c"].members.clear();
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_EQ(place(number, "c").why, "its session has ended");
}

TEST_F(ThreeWorkers, MayEndOnceTheyHaveEverything) {
  const RoundId number = spread();
  set("c", RoundMemberState::kFilled);
  ASSERT_TRUE(say("c"));
  reports["c"].members.clear();
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
  EXPECT_EQ(place(number, "c").why, "its session has ended");
}

TEST_F(ThreeWorkers, Row43AnAgentThatLeavesTheRoundStopsTheOthers) {
  const RoundId number = spread();
  set("b", RoundMemberState::kServing);
  member("b").round = 0;
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_EQ(place(number, "b").state_name(), "failed");
}

TEST_F(ThreeWorkers, Row43ADeviceProcessThatEndsStopsTheOthers) {
  const RoundId number = spread();
  reports["b"].device_life = "another";
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_THAT(order("a", number).why, HasSubstr("device process"));
}

TEST_F(ThreeWorkers, Row43ADeadNodeStopsTheOthersAndEndsTheRound) {
  const RoundId number = spread();
  kill("b");
  silent.insert("b");
  pass(2200ms);
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_THAT(order("a", number).why, HasSubstr("the node died"));
  for (const char* name : {"a", "c"}) set(name, RoundMemberState::kReady);
  pass(100ms);
  EXPECT_TRUE(round(number).over());
  EXPECT_EQ(place(number, "b").why, "the node died");
}

TEST_F(ThreeWorkers, Row43AnAgentThatStartsAnewStopsTheOthers) {
  const RoundId number = spread();
  add_node("b");
  add_worker("b", "ib");
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_EQ(place(number, "b").why, "its agent has started anew");
}

TEST_F(ThreeWorkers, Row43ASilentAgentStopsTheOthers) {
  const RoundId number = spread();
  silent.insert("b");
  pass(4900ms);
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
  pass(200ms);
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
}

TEST_F(ThreeWorkers, ThatWaitForAnAnswerAreNotSilent) {
  const RoundId number = spread();
  reports["b"].wait = 5s;
  ASSERT_TRUE(say("b"));
  silent.insert("b");
  pass(9s);
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
}

TEST_F(ThreeWorkers, APartyWithoutProgressIsStopped) {
  const RoundId number = spread();
  pass(29s);
  member("b").spread_bytes = 10;
  pass(29s);
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
  pass(2s);
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
}

TEST_F(ThreeWorkers, HaveUntilADeadlineToBecomeReady) {
  const RoundId number = spread();
  everybody(RoundMemberState::kFilled);
  set("a", RoundMemberState::kReady);
  pass(599s);
  EXPECT_FALSE(round(number).over());
  pass(2s);
  EXPECT_TRUE(round(number).over());
  EXPECT_TRUE(place(number, "a").ready());
  EXPECT_THAT(place(number, "b").why, HasSubstr("has not become ready"));
}

TEST_F(ThreeWorkers, AreHeardOfInOrder) {
  const RoundReport early = reports["a"];
  ASSERT_TRUE(say("a"));
  EXPECT_EQ(rounds.report(early, now).error().code(), ErrorCode::kStale);
}

TEST_F(ThreeWorkers, APauseOfTheCoordinatorCountsAgainstNobody) {
  const RoundId number = begin();
  now += 1h;
  rounds.shift(1h);
  for (const auto& [name, report] : reports) {
    ASSERT_TRUE(members.hear(name, report.incarnation, now));
  }
  rounds.advance(members, now);
  EXPECT_EQ(round(number).phase(), RoundPhase::kGathering);
  EXPECT_FALSE(rounds.orders_for("a").empty());
}

}  // namespace
}  // namespace rekindle::coordinator
