// Pulls: their sources, their leases, and the quarantine of sources.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

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
  const auto late = world.open(world.node("p"), "qwen3");
  ASSERT_FALSE(late) << "nor does the silence of its holder";
  EXPECT_EQ(late.error().code(), ErrorCode::kUnavailable);
  world.disconnect(b);
  world.holder("b", kV2);
  EXPECT_EQ(world.open(world.node("p"), "qwen3")->id, kV2);
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
      EXPECT_GT(offer.grant.expiry_ms, clock_ms(world.now));
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
      EXPECT_EQ(offer.layout, (Digest{1, 9}));
    }
    if (!offer.complete) {
      EXPECT_THAT(offer.held, ElementsAre(std::pair{0u, 5u}));
    }
  }
}

TEST(CoordinatorPulls, Row14TooManyPullersWaitAndAreToldHowLong) {
  Limits limits;
  limits.max_pullers_per_source = 2;
  CoreWorld world(limits);
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto first = world.open(p, "qwen3");
  const auto second = world.open(world.node("q"), "qwen3");
  const NodeInfo r = world.node("r");
  const auto third = world.open(r, "qwen3");
  ASSERT_TRUE(first && second && third);
  EXPECT_FALSE(first->sources.empty());
  EXPECT_FALSE(second->sources.empty());
  EXPECT_TRUE(third->sources.empty());
  EXPECT_EQ(third->retry_after, 200ms) << "those who have just begun may serve in a moment";
  world.pass(2s, {a});
  ASSERT_TRUE(world.progress(p, *first, {}, 400));  // 200 B/s: 3 s to go
  const auto again = world.open(r, "qwen3");
  EXPECT_EQ(again->retry_after, 3s);
  world.close(first->pull_id);
  EXPECT_FALSE(world.open(r, "qwen3")->sources.empty());
}

TEST(CoordinatorPulls, WhoFillsUpItselfServesAsManyAsItReadsFrom) {
  Limits limits;
  limits.max_pullers_per_source = 2;
  limits.max_sources_per_pull = 5;
  CoreWorld world(limits);
  world.holder("a", kV1);
  const NodeInfo b = world.node("b");
  ASSERT_TRUE(world.enroll(b));
  ASSERT_TRUE(world.announce(b, {CoreWorld::holding(kV1, 1, 1, /*complete=*/false)}));
  const auto open = [&](const std::string& name) {
    return CoreWorld::names(world.open(world.node(name), "qwen3")->sources);
  };
  EXPECT_THAT(open("p1"), UnorderedElementsAre("a", "b"));
  EXPECT_THAT(open("p2"), UnorderedElementsAre("a", "b"));
  for (const char* name : {"p3", "p4", "p5"}) EXPECT_THAT(open(name), ElementsAre("b"));
  EXPECT_THAT(open("p6"), IsEmpty());
  EXPECT_EQ(world.core->pulls().table().pullers_of(b.incarnation), 5u);
  ASSERT_TRUE(world.announce(b, {CoreWorld::holding(kV1)}));
  EXPECT_THAT(open("p7"), IsEmpty()) << "it may have work by now: two, and it has more";
  EXPECT_EQ(world.core->pulls().table().pullers_of(b.incarnation), 5u)
      << "those that read there go on";
}

TEST(CoordinatorPulls, AskingAgainDoesNotTakeASecondShare) {
  Limits limits;
  limits.max_pullers_per_source = 1;
  CoreWorld world(limits);
  world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(world.open(p, "qwen3")->sources.size(), 1u);
  EXPECT_EQ(world.core->pulls().table().all().size(), 1u);
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
  EXPECT_EQ(world.core->pulls().table().all().size(), 1u) << "progress renews it";
  const NodeInfo q = world.node("q");
  EXPECT_TRUE(world.open(q, "qwen3")->sources.empty());
  world.pass(3s, {a});
  EXPECT_THAT(world.core->pulls().table().all(), IsEmpty());
  EXPECT_EQ(world.open(q, "qwen3")->sources.size(), 1u);
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
  EXPECT_EQ(world.core->pulls().table().all().begin()->second.sources.size(), 1u);
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

TEST(CoordinatorPulls, ALateWordOfAClosedPullBringsItNotBack) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  SourceReport bad = report(a);
  bad.quarantine = true;
  ASSERT_TRUE(world.progress(p, *pull, {bad}));
  world.close(pull->pull_id);
  world.pass(9s, {a});
  EXPECT_EQ(world.progress(p, *pull, {bad}).error().code(), ErrorCode::kStale);
  EXPECT_EQ(world.core->pulls().table().pullers_of(a.incarnation), 0u);
  world.pass(1100ms, {a});
  EXPECT_TRUE(world.open(world.node("q"), "qwen3")) << "its strike has not been counted again";
}

TEST(CoordinatorPulls, OnlyWhoOpenedAPullClosesIt) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  const Incarnation thief = world.node("thief").incarnation;
  const auto refused = world.core->close_pull(pull->pull_id, thief, world.now);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_TRUE(world.progress(p, *pull)) << "it runs";
  world.restart();
  ASSERT_TRUE(world.core->close_pull(pull->pull_id, thief, world.now)) << "nobody's yet";
  EXPECT_TRUE(world.progress(p, *pull)) << "and no word of its puller";
  ASSERT_TRUE(world.core->close_pull(pull->pull_id, p.incarnation, world.now));
  EXPECT_EQ(world.progress(p, *pull).error().code(), ErrorCode::kStale);
}

TEST(CoordinatorPulls, Row36ASourceThatServedWrongBytesIsQuarantinedWithBackOff) {
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

// Three pullers that lack the same tiles would wait for each other beside a whole copy.
TEST(CoordinatorPulls, APullThatReadsOnlyFromThoseThatFillUpGetsACompleteSourceToo) {
  Limits limits;
  limits.max_sources_per_pull = 2;
  CoreWorld world(limits);
  for (const char* name : {"a", "b"}) {
    const NodeInfo growing = world.node(name);
    ASSERT_TRUE(world.enroll(growing));
    ASSERT_TRUE(world.announce(growing, {CoreWorld::holding(kV1, 1, 1, /*complete=*/false)}));
  }
  const NodeInfo first = world.holder("w", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  EXPECT_THAT(CoreWorld::names(pull->sources), ::testing::Contains("w"));
  ASSERT_EQ(pull->sources.size(), 2u);

  // It is gone, both places are taken by others; it comes back.
  world.disconnect(first);
  NodeInfo next = world.node("w");
  SourceReport lost = report(first);
  lost.lost = true;
  ASSERT_TRUE(world.progress(p, *pull, {lost}));
  ASSERT_TRUE(world.enroll(next));
  ASSERT_TRUE(world.announce(next, {CoreWorld::holding(kV1)}));
  const auto answer = world.progress(p, *pull);
  ASSERT_TRUE(answer);
  EXPECT_THAT(CoreWorld::names(answer->sources), ::testing::Contains("w"));
  EXPECT_LE(answer->sources.size(), 2u);
}

TEST(CoordinatorQuarantine, WhoFoundAllHoldersBadIsToldWhichAndHowLong) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  SourceReport bad_a = report(a);
  SourceReport bad_b = report(b);
  bad_a.quarantine = bad_b.quarantine = true;
  ASSERT_TRUE(world.progress(p, *pull, {bad_a, bad_b}));
  const auto refused = world.open(p, "qwen3");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable) << "it may come back";
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("wrong bytes"), HasSubstr("10000 ms"),
                                               HasSubstr("a, b"), HasSubstr("rekindle verify")));
  world.pass(11s, {a, b});
  EXPECT_TRUE(world.open(p, "qwen3"));
}

TEST(CoordinatorQuarantine, OnePullersWordLocksNobodyElseOut) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo other = world.node("other");
  const auto running = world.open(other, "qwen3");
  const NodeInfo broken = world.node("broken");
  const auto pull = world.open(broken, "qwen3");
  ASSERT_TRUE(pull && running);
  SourceReport bad_a = report(a);
  SourceReport bad_b = report(b);
  bad_a.quarantine = bad_b.quarantine = true;
  EXPECT_THAT(world.progress(broken, *pull, {bad_a, bad_b})->sources, IsEmpty());
  EXPECT_EQ(world.progress(other, *running)->sources.size(), 2u) << "it goes on";
  const auto opened = world.open(world.node("q"), "qwen3");
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->sources.size(), 2u);
}

TEST(CoordinatorQuarantine, AQuarantinedSourceIsOfferedOnlyWhereNoOtherHasAllOfIt) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  SourceReport bad = report(a);
  bad.quarantine = true;
  ASSERT_TRUE(world.progress(p, *pull, {bad}));
  const NodeInfo growing = world.node("growing");
  ASSERT_TRUE(world.enroll(growing));
  ASSERT_TRUE(world.announce(growing, {CoreWorld::holding(kV1, 1, 1, /*complete=*/false)}));
  const auto both = world.open(world.node("q"), "qwen3");
  EXPECT_EQ(both->sources.size(), 2u) << "a part is not all of it";
  const NodeInfo b = world.holder("b", kV1);
  const auto others = world.open(world.node("r"), "qwen3");
  EXPECT_THAT(CoreWorld::names(others->sources), UnorderedElementsAre("b", "growing"));
  EXPECT_EQ(world.core->pulls().table().pullers_of(a.incarnation), 1u) << "q";
  ASSERT_TRUE(world.core->drain("b", true, world.now));
  EXPECT_THAT(CoreWorld::names(world.open(world.node("s"), "qwen3")->sources),
              UnorderedElementsAre("a", "growing"))
      << "rather than one that shall be left alone";
}

TEST(CoordinatorQuarantine, WhatNobodyHoldsIsStillNotFound) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  SourceReport bad = report(a);
  bad.quarantine = true;
  ASSERT_TRUE(world.progress(p, *pull, {bad}));
  world.pass(5s, {a});  // the grace is over
  const auto absent = world.open(world.node("q"), "absent");
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code(), ErrorCode::kNotFound);
}

}  // namespace
}  // namespace rekindle::coordinator
