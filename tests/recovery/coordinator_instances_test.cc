#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

// Instances whose ranks live on several hosts.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

class TwoRanks : public ::testing::Test {
 protected:
  RankReport rank(std::uint32_t number, RankState state, std::uint64_t generation = 1) {
    const NodeInfo& node = number == 0 ? a_ : b_;
    RankReport report;
    report.node_id = node.node_id;
    report.incarnation = node.incarnation;
    report.instance = "chat";
    report.generation = generation;
    report.rank = number;
    report.world = 2;
    report.model = "qwen3";
    report.state = state;
    report.sequence = ++sequence_;
    if (state == RankState::kLoaded) report.has = kV1;
    return report;
  }
  Result<InstanceAnswer> say(const RankReport& report) {
    return world_.core->report_rank(report, world_.now);
  }
  void commit_both() {
    for (const std::uint32_t number : {0u, 1u})
      ASSERT_TRUE(say(rank(number, RankState::kAttached)));
    for (const std::uint32_t number : {0u, 1u}) ASSERT_TRUE(say(rank(number, RankState::kLoaded)));
    ASSERT_EQ(state(), InstanceState::kCommitted);
  }
  InstanceState state() const { return world_.core->instances().all().at("chat").state; }

  CoreWorld world_;
  NodeInfo a_ = world_.holder("a", kV1);
  NodeInfo b_ = world_.holder("b", kV1);
  std::uint64_t sequence_ = 0;

  void SetUp() override { world_.pass(3s, {a_, b_}); }
};

TEST_F(TwoRanks, CommitComesWhenEveryRankHasLoaded) {
  EXPECT_EQ(say(rank(0, RankState::kAttached))->id, kV1);
  EXPECT_EQ(say(rank(0, RankState::kLoaded))->state, InstanceState::kLoading);
  EXPECT_EQ(say(rank(1, RankState::kAttached))->state, InstanceState::kLoading);
  const auto last = say(rank(1, RankState::kLoaded));
  EXPECT_EQ(last->state, InstanceState::kCommitted);
  EXPECT_EQ(last->loaded, 2u);
  EXPECT_EQ(say(rank(0, RankState::kLoaded))->state, InstanceState::kCommitted);
}

TEST_F(TwoRanks, LatestIsResolvedOnceInAGeneration) {
  EXPECT_EQ(say(rank(0, RankState::kAttached))->id, kV1);
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV2, 2)}));
  EXPECT_EQ(world_.open(world_.node("p"), "qwen3")->id, kV2);
  EXPECT_EQ(say(rank(1, RankState::kAttached))->id, kV1) << "what the first rank got";
  EXPECT_EQ(say(rank(1, RankState::kAttached, 2))->id, kV2) << "a new generation";
  const auto late = say(rank(0, RankState::kLoaded, 1));
  EXPECT_EQ(late.error().code(), ErrorCode::kStale);
}

TEST_F(TwoRanks, AnotherVersionIsNoWordForCommit) {
  ASSERT_TRUE(say(rank(0, RankState::kAttached)));
  RankReport other = rank(1, RankState::kLoaded);
  other.has = kV2;
  const auto answer = say(other);
  EXPECT_EQ(answer->state, InstanceState::kUnfit);
  EXPECT_THAT(answer->why, AllOf(HasSubstr("rank 1 on b"), HasSubstr("qwen3@2")));
  RankReport nameless = rank(0, RankState::kLoaded);
  nameless.has.reset();
  EXPECT_EQ(say(nameless)->state, InstanceState::kUnfit);
}

TEST_F(TwoRanks, ADeadNodeMakesItUnfitUntilItsRankHasLoadedAgain) {
  commit_both();
  world_.pass(3s, {a_});
  const auto told = say(rank(0, RankState::kLoaded));
  EXPECT_EQ(told->state, InstanceState::kUnfit);
  EXPECT_EQ(told->why, "rank 1 on b: the node died");
  b_ = world_.holder("b", kV1);
  EXPECT_EQ(say(rank(1, RankState::kAttached))->state, InstanceState::kLoading);
  EXPECT_EQ(say(rank(1, RankState::kLoaded))->state, InstanceState::kCommitted)
      << "the other one need not load again";
}

TEST_F(TwoRanks, ARankOfWhichItsAgentIsSilentIsLost) {
  commit_both();
  world_.pass(4900ms, {a_, b_});
  ASSERT_TRUE(say(rank(0, RankState::kLoaded)));
  EXPECT_EQ(state(), InstanceState::kCommitted);
  world_.pass(300ms, {a_, b_});
  EXPECT_THAT(say(rank(0, RankState::kLoaded))->why, HasSubstr("rank 1 on b"));
}

TEST_F(TwoRanks, AWorkerThatDiedIsNamed) {
  commit_both();
  RankReport failed = rank(1, RankState::kFailed);
  failed.why = "the worker was killed";
  EXPECT_EQ(say(failed)->why, "rank 1 on b: the worker was killed");
  EXPECT_EQ(say(rank(0, RankState::kLoaded))->state, InstanceState::kUnfit);
}

TEST_F(TwoRanks, WhatComesLateFromTheSameAgentIsNotTaken) {
  const RankReport early = rank(1, RankState::kLoaded);
  ASSERT_TRUE(say(rank(0, RankState::kAttached)));
  ASSERT_TRUE(say(rank(0, RankState::kLoaded)));
  RankReport failed = rank(1, RankState::kFailed);
  ASSERT_TRUE(say(rank(1, RankState::kAttached)));
  failed.sequence = ++sequence_;
  ASSERT_TRUE(say(failed));
  EXPECT_EQ(say(early)->state, InstanceState::kUnfit);
}

TEST_F(TwoRanks, ARankThatLivesElsewhereIsNotGivenAway) {
  ASSERT_TRUE(say(rank(0, RankState::kAttached)));
  RankReport thief = rank(0, RankState::kAttached);
  thief.node_id = b_.node_id;
  thief.incarnation = b_.incarnation;
  const auto refused = say(thief);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(refused.error().message(), HasSubstr("is attached on a"));
  world_.pass(3s, {b_});
  EXPECT_TRUE(say(thief)) << "a is dead";
}

TEST_F(TwoRanks, RanksThatContradictTheirInstanceAreRefused) {
  ASSERT_TRUE(say(rank(0, RankState::kAttached)));
  RankReport wide = rank(1, RankState::kAttached);
  wide.world = 3;
  EXPECT_EQ(say(wide).error().code(), ErrorCode::kDenied);
  RankReport other = rank(1, RankState::kAttached);
  other.version = 7;
  EXPECT_EQ(say(other).error().code(), ErrorCode::kDenied);
  RankReport beyond = rank(1, RankState::kAttached);
  beyond.rank = 2;
  EXPECT_EQ(say(beyond).error().code(), ErrorCode::kInvalid);
  RankReport stranger = rank(1, RankState::kAttached);
  stranger.incarnation = world_.node("x").incarnation;
  EXPECT_EQ(say(stranger).error().code(), ErrorCode::kUnavailable) << "it is not a member";
}

TEST_F(TwoRanks, AReportThatContradictsItselfBeginsNoGeneration) {
  commit_both();
  RankReport torn = rank(0, RankState::kAttached, 2);
  torn.version = 2;
  torn.has = kV1;
  EXPECT_EQ(say(torn).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(state(), InstanceState::kCommitted) << "the generation before goes on";
  EXPECT_TRUE(say(rank(1, RankState::kLoaded)));
}

TEST_F(TwoRanks, ARankWhoseNodeMustRegisterAgainIsToldToRepeatIt) {
  commit_both();
  world_.pass(3s, {b_});
  EXPECT_EQ(say(rank(0, RankState::kLoaded)).error().code(), ErrorCode::kUnavailable)
      << "its agent was paused";
  ASSERT_TRUE(world_.enroll(a_));
  EXPECT_EQ(say(rank(0, RankState::kLoaded))->state, InstanceState::kCommitted);
}

TEST_F(TwoRanks, ARestartOfTheCoordinatorKeepsTheVersionThatWasResolved) {
  commit_both();
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV2, 2)}));
  world_.restart();
  for (const NodeInfo& node : {a_, b_}) ASSERT_TRUE(world_.enroll(node));
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV2, 2), CoreWorld::holding(kV1)}));
  RankReport knows_nothing = rank(1, RankState::kAttached);
  EXPECT_EQ(say(knows_nothing).error().code(), ErrorCode::kUnavailable)
      << "in the grace another rank may know";
  EXPECT_EQ(say(rank(0, RankState::kLoaded))->state, InstanceState::kLoading);
  EXPECT_EQ(say(rank(1, RankState::kAttached))->id, kV1);
  EXPECT_EQ(say(rank(1, RankState::kLoaded))->state, InstanceState::kCommitted);
}

TEST_F(TwoRanks, TheNewsOfALostRankDoesNotBeginAnInstance) {
  EXPECT_EQ(say(rank(0, RankState::kGone)).error().code(), ErrorCode::kNotFound);
  EXPECT_TRUE(world_.core->instances().all().empty());
}

TEST_F(TwoRanks, AnInstanceWithoutRanksIsForgotten) {
  commit_both();
  for (const std::uint32_t number : {0u, 1u}) ASSERT_TRUE(say(rank(number, RankState::kGone)));
  EXPECT_EQ(state(), InstanceState::kUnfit);
  world_.pass(10min + 1s, {a_, b_});
  EXPECT_TRUE(world_.core->instances().all().empty());
}

TEST(InstanceCaps, C5OnlyInstancesThatSpanNodesCountForTheCapOfTheFleet) {
  CoreWorld world({.max_spanning_instances = 2, .max_instances_per_node = 4});
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  world.pass(3s, {a, b});
  std::uint64_t sequence = 0;
  const auto say = [&](const NodeInfo& node, const std::string& name, std::uint32_t rank,
                       RankState state = RankState::kAttached) {
    RankReport report;
    report.node_id = node.node_id;
    report.incarnation = node.incarnation;
    report.instance = name;
    report.generation = 1;
    report.rank = rank;
    report.world = 2;
    report.model = "qwen3";
    report.state = state;
    report.sequence = ++sequence;
    return world.core->report_rank(report, world.now);
  };
  for (const char* name : {"1", "2", "3", "4"}) {
    ASSERT_TRUE(say(a, name, 0));
    ASSERT_TRUE(say(a, name, 1)) << "on the same node";
  }
  EXPECT_EQ(say(a, "5", 0).error().code(), ErrorCode::kExhausted);
  for (const char* name : {"x", "y", "z"}) ASSERT_TRUE(say(b, name, 0));
  EXPECT_TRUE(say(a, "x", 1));
  EXPECT_TRUE(say(a, "y", 1));
  EXPECT_EQ(say(a, "z", 1).error().code(), ErrorCode::kExhausted) << "two span nodes";
  EXPECT_TRUE(say(b, "w", 0)) << "x and y do not count for b any more";
  // One that has ended makes room.
  for (const NodeInfo& node : {b, a}) {
    ASSERT_TRUE(say(node, "x", node.node_id == "b" ? 0 : 1, RankState::kGone));
  }
  for (int i = 0; i < 11; ++i) world.pass(60s, {a, b});
  EXPECT_FALSE(world.core->instances().all().contains("x"));
}

}  // namespace
}  // namespace rekindle::coordinator
