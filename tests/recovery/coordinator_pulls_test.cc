// OpenPull and what follows it: who may pull from whom, and for how long.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

const ModelVersion kV1{"qwen3", 1};
const ModelVersion kV2{"qwen3", 2};

TEST(CoordinatorPulls, LatestIsTheHighestReadyVersion) {
  CoreWorld world;
  world.holder("a", kV1);
  EXPECT_EQ(world.open(world.node("p"), "qwen3")->id, kV1);
  world.holder("b", kV2);
  EXPECT_EQ(world.open(world.node("p"), "qwen3")->id, kV2);
}

TEST(CoordinatorPulls, ARestartDoesNotTurnLatestBack) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV2);
  world.restart();
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  const auto early = world.open(world.node("p"), "qwen3");
  ASSERT_FALSE(early) << "the holder of version 2 has not reported yet";
  EXPECT_EQ(early.error().code(), ErrorCode::kUnavailable);
  world.pass(3s, {a});
  EXPECT_EQ(world.open(world.node("p"), "qwen3")->id, kV1) << "after the grace it is gone";
}

TEST(CoordinatorPulls, NoSourceWaitsForTheGraceAndThenNamesWhatExists) {
  CoreWorld world;
  const auto early = world.open(world.node("p"), "qwen3", 1);
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(early.error().message(), HasSubstr("retry in"));
  const NodeInfo a = world.holder("a", kV2);
  world.pass(3s, {a});
  const auto late = world.open(world.node("p"), "qwen3", 1);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(late.error().message(), HasSubstr("qwen3@1"));
  EXPECT_THAT(late.error().message(), HasSubstr("qwen3@2 (ready)"));
}

TEST(CoordinatorPulls, ThePullerIsNotItsOwnSource) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  world.holder("b", kV1);
  EXPECT_THAT(CoreWorld::names(world.open(a, "qwen3")->sources), ElementsAre("b"));
}

TEST(CoordinatorPulls, GrantsNameTheLivingIncarnationAndNeverRepeatASerial) {
  CoreWorld world;
  const NodeInfo first = world.holder("a", kV1);
  world.holder("b", kV1);
  world.disconnect(first);
  const NodeInfo second = world.holder("a", kV1);
  const NodeInfo puller = world.node("p");
  std::set<std::uint64_t> serials;
  for (int i = 0; i < 3; ++i) {
    const auto opened = world.open(puller, "qwen3");
    ASSERT_TRUE(opened);
    ASSERT_EQ(opened->sources.size(), 2u);
    for (const auto& offer : opened->sources) {
      EXPECT_NE(offer.grant.source, first.incarnation);
      EXPECT_EQ(offer.grant.source, offer.node.incarnation);
      EXPECT_EQ(offer.grant.puller, puller.incarnation);
      EXPECT_EQ(offer.grant.root, opened->version.root);
      EXPECT_GT(offer.grant.expiry_ms, Core::clock_ms(world.now));
      EXPECT_TRUE(serials.insert(offer.grant.serial).second);
    }
  }
}

TEST(CoordinatorPulls, SuspectSourcesComeLastAndDeadOnesNotAtAll) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo c = world.holder("c", kV1);
  world.pass(3s, {a, b, c});
  world.pass(1s, {b, c});
  for (int i = 0; i < 4; ++i) {
    const auto sources = CoreWorld::names(world.open(world.node("p"), "qwen3")->sources);
    ASSERT_EQ(sources.size(), 3u);
    EXPECT_EQ(sources.back(), "a");
  }
  world.pass(2s, {b, c});
  EXPECT_THAT(CoreWorld::names(world.open(world.node("p"), "qwen3")->sources),
              UnorderedElementsAre("b", "c"));
}

TEST(CoordinatorPulls, PullersSpreadOverTheSources) {
  Limits limits;
  limits.max_sources_per_pull = 2;
  CoreWorld world(limits);
  for (int i = 0; i < 8; ++i) world.holder(fmt::format("s{}", i), kV1);
  std::map<std::string, int> pullers;
  for (int i = 0; i < 16; ++i) {
    for (const auto& name :
         CoreWorld::names(world.open(world.node(fmt::format("p{}", i)), "qwen3")->sources)) {
      ++pullers[name];
    }
  }
  ASSERT_EQ(pullers.size(), 8u);
  for (const auto& [name, count] : pullers) EXPECT_EQ(count, 4) << name;
}

TEST(CoordinatorPulls, ASourceOfTheSameHostComesFirst) {
  CoreWorld world;
  for (int i = 0; i < 4; ++i) world.holder(fmt::format("s{}", i), kV1);
  NodeInfo puller = world.node("p");
  puller.host_id = "host-s2";
  EXPECT_EQ(world.open(puller, "qwen3")->sources.front().node.node_id, "s2");
}

TEST(CoordinatorPulls, AWholeCopyIsOfferedAloneShardsTogether) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  const NodeInfo b = world.node("b");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.enroll(b));
  ASSERT_TRUE(world.announce(
      a, {CoreWorld::holding(kV1, 1, 1), CoreWorld::holding(kV1, 1, 2, true, false)}));
  ASSERT_TRUE(world.announce(
      b, {CoreWorld::holding(kV1, 1, 2, true, false), CoreWorld::holding(kV1, 1, 3, false, true)}));
  const auto opened = world.open(world.node("p"), "qwen3");
  ASSERT_EQ(opened->sources.size(), 3u);
  for (const auto& offer : opened->sources) {
    if (offer.node.node_id == "a") {
      EXPECT_EQ(offer.layout, (Digest128{1, 9}));
    }
    if (!offer.complete) {
      EXPECT_THAT(offer.held, ElementsAre(std::pair{0u, 5u}));
    }
  }
}

TEST(CoordinatorPulls, TooManyPullersWaitAndAreToldHowLong) {
  Limits limits;
  limits.max_pullers_per_source = 2;
  CoreWorld world(limits);
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto first = world.open(p, "qwen3");
  const auto second = world.open(world.node("q"), "qwen3");
  const auto third = world.open(world.node("r"), "qwen3");
  ASSERT_TRUE(first && second && third);
  EXPECT_FALSE(first->sources.empty());
  EXPECT_FALSE(second->sources.empty());
  EXPECT_TRUE(third->sources.empty());
  EXPECT_GT(third->retry_after, Duration::zero());
  world.pass(1s, {a});
  ASSERT_TRUE(world.progress(p, *first, {}, 400));  // 400 B/s: 1.5 s to go
  const auto again = world.open(world.node("r"), "qwen3");
  EXPECT_EQ(again->retry_after, 1500ms);
  world.core->close_pull(first->pull_id, world.now);
  EXPECT_FALSE(world.open(world.node("r"), "qwen3")->sources.empty());
}

TEST(CoordinatorPulls, AskingAgainDoesNotTakeASecondShare) {
  Limits limits;
  limits.max_pullers_per_source = 1;
  CoreWorld world(limits);
  world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(world.open(p, "qwen3")->sources.size(), 1u);
  EXPECT_EQ(world.core->pulls().size(), 1u);
}

TEST(CoordinatorPulls, APullWithoutProgressLosesItsLeaseAndItsShares) {
  Limits limits;
  limits.max_pullers_per_source = 1;
  CoreWorld world(limits);
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  world.pass(8s, {a});
  ASSERT_TRUE(world.progress(p, *pull));
  world.pass(8s, {a});
  EXPECT_EQ(world.core->pulls().size(), 1u) << "progress renews it";
  EXPECT_TRUE(world.open(world.node("q"), "qwen3")->sources.empty());
  world.pass(3s, {a});
  EXPECT_THAT(world.core->pulls(), IsEmpty());
  EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.size(), 1u);
}

TEST(CoordinatorPulls, ProgressBringsNewSourcesAndDropsDeadOnes) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  world.pass(3s, {a});
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  const NodeInfo b = world.holder("b", kV1);
  EXPECT_THAT(CoreWorld::names(world.progress(p, *pull)->sources), ElementsAre("a", "b"))
      << "the one in use first";
  world.pass(3s, {b});
  EXPECT_THAT(CoreWorld::names(world.progress(p, *pull)->sources), ElementsAre("b"));
  EXPECT_EQ(world.core->pulls().begin()->second.sources.size(), 1u);
}

TEST(CoordinatorPulls, ARunningPullSurvivesARestartOfTheCoordinator) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  world.restart();
  const auto early = world.progress(p, *pull, {}, 500);
  ASSERT_TRUE(early) << early.error().message();
  EXPECT_THAT(early->sources, IsEmpty());
  EXPECT_TRUE(early->grace) << "the puller keeps what it has";
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  EXPECT_THAT(CoreWorld::names(world.progress(p, *pull, {}, 600)->sources), ElementsAre("a"));
  EXPECT_EQ(world.progress(world.node("thief"), *pull).error().code(), ErrorCode::kDenied);
}

TEST(CoordinatorPulls, ASourceThatServedWrongBytesIsQuarantinedWithBackOff) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  SourceReport bad = report(a);
  bad.quarantine = true;
  EXPECT_THAT(CoreWorld::names(world.progress(p, *pull, {bad})->sources), ElementsAre("b"));
  EXPECT_THAT(CoreWorld::names(world.open(world.node("q"), "qwen3")->sources), ElementsAre("b"));
  for (int i = 0; i < 90; ++i) {  // repeating the report adds nothing
    world.pass(100ms, {a, b});
    ASSERT_TRUE(world.progress(p, *pull, {bad}));
  }
  world.pass(1100ms, {a, b});
  EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.size(), 2u) << "10 s have passed";
  const auto second = world.open(world.node("q"), "qwen3");
  ASSERT_TRUE(
      world.core
          ->pull_progress({second->pull_id, second->sources[0].node, kV1, 0, 0, {bad}}, world.now)
          .error()
          .code() == ErrorCode::kDenied)
      << "only the puller reports for its pull";
  const NodeInfo r = world.node("r");
  const auto third = world.open(r, "qwen3");
  ASSERT_TRUE(world.progress(r, *third, {bad}));
  world.pass(15s, {a, b});
  EXPECT_THAT(CoreWorld::names(world.open(world.node("q"), "qwen3")->sources), ElementsAre("b"))
      << "the second time it is out twice as long";
  world.pass(6s, {a, b});
  EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.size(), 2u);
}

TEST(CoordinatorPulls, ALostSourceIsSuspectForOthersForAWhile) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  SourceReport lost = report(a);
  lost.lost = true;
  ASSERT_TRUE(world.progress(p, *pull, {lost}));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.back().node.node_id, "a");
  }
  const NodeInfo stranger = world.node("a");  // same name, another life: not meant
  SourceReport old = report(stranger);
  old.quarantine = true;
  ASSERT_TRUE(world.progress(p, *pull, {old}));
  EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.size(), 2u);
}

}  // namespace
}  // namespace rekindle::coordinator
