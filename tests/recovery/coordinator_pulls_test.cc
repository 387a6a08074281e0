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

TEST(CoordinatorPulls, ARestartDoesNotMoveLatestBack) {
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
  ASSERT_FALSE(late) << "the silence of its holder does not move latest back either";
  EXPECT_EQ(late.error().code(), ErrorCode::kUnavailable);
  world.disconnect(b);
  world.holder("b", kV2);
  EXPECT_EQ(world.open(world.node("p"), "qwen3")->id, kV2);
}

TEST(CoordinatorPulls, WithoutASourceTheErrorComesAfterTheGraceAndNamesTheVersions) {
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
  EXPECT_THAT(world.sources(a), ElementsAre("b"));
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
    const auto sources = world.sources("p");
    ASSERT_EQ(sources.size(), 3u);
    EXPECT_EQ(sources.back(), "a");
  }
  world.pass(2s, {b, c});
  EXPECT_THAT(world.sources("p"), UnorderedElementsAre("b", "c"));
}

TEST(CoordinatorPulls, PullersSpreadOverTheSources) {
  CoreWorld world({.max_sources_per_pull = 2});
  for (int i = 0; i < 8; ++i) world.holder(fmt::format("s{}", i), kV1);
  std::map<std::string, int> pullers;
  for (int i = 0; i < 16; ++i) {
    for (const auto& name : world.sources(fmt::format("p{}", i))) ++pullers[name];
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

TEST(CoordinatorPulls, AWholeCopyIsOfferedAloneAndShardsAreOfferedTogether) {
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

TEST(CoordinatorPulls, Row14PullersAboveTheLimitWaitAndLearnHowLong) {
  CoreWorld world({.max_pullers_per_source = 2});
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
  EXPECT_EQ(third->retry_after, 200ms) << "pullers that have just begun may serve soon";
  world.pass(2s, {a});
  ASSERT_TRUE(world.progress(p, *first, {}, 400));  // At 200 B/s it takes 3 s more.
  const auto again = world.open(r, "qwen3");
  EXPECT_EQ(again->retry_after, 3s);
  world.close(first->pull_id);
  EXPECT_FALSE(world.open(r, "qwen3")->sources.empty());
}

TEST(CoordinatorPulls, APartyWhosePullsNeverEndKeepsNobodyWaiting) {
  CoreWorld world;
  world.holder("a", kV1);
  int served = 0;
  for (int i = 0; i < 40; ++i) {
    NodeInfo hog = world.node("hog");
    hog.party = "host 10.0.0.9";
    const auto pull = world.open(hog, "qwen3");
    ASSERT_TRUE(pull);
    if (!pull->sources.empty()) ++served;
  }
  EXPECT_EQ(served, 8);
  for (const char* const name : {"p", "q"}) {
    NodeInfo honest = world.node(name);
    honest.party = fmt::format("host of {}", name);
    EXPECT_THAT(world.sources(honest), ElementsAre("a")) << name;
  }
  NodeInfo hog = world.node("hog");
  hog.party = "host 10.0.0.9";
  EXPECT_THAT(world.sources(hog), IsEmpty());
}

TEST(CoordinatorPulls, ANodeThatFillsUpServesAsManyPullsAsItReadsFrom) {
  CoreWorld world({.max_pullers_per_source = 2, .max_sources_per_pull = 5});
  world.holder("a", kV1);
  const NodeInfo b = world.filling("b");
  const auto open = [&](const std::string& name) {
    return CoreWorld::names(world.open(world.node(name), "qwen3")->sources);
  };
  EXPECT_THAT(open("p1"), UnorderedElementsAre("a", "b"));
  EXPECT_THAT(open("p2"), UnorderedElementsAre("a", "b"));
  for (const char* name : {"p3", "p4", "p5"}) EXPECT_THAT(open(name), ElementsAre("b"));
  EXPECT_THAT(open("p6"), IsEmpty());
  EXPECT_EQ(world.core->pulls().table().pullers_of(b.incarnation), 5u);
  ASSERT_TRUE(world.announce(b, {CoreWorld::holding(kV1)}));
  EXPECT_THAT(open("p7"), IsEmpty()) << "a complete source serves two pulls, and it has more";
  EXPECT_EQ(world.core->pulls().table().pullers_of(b.incarnation), 5u)
      << "pulls that read there go on";
}

TEST(CoordinatorPulls, AskingAgainDoesNotTakeASecondShare) {
  CoreWorld world({.max_pullers_per_source = 1});
  world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(world.open(p, "qwen3")->sources.size(), 1u);
  EXPECT_EQ(world.core->pulls().table().all().size(), 1u);
}

TEST(CoordinatorPulls, APullWithoutProgressLosesItsLeaseAndItsShares) {
  RunningPull world({.max_pullers_per_source = 1});
  world.pass(8s, {world.a});
  ASSERT_TRUE(world.go_on());
  world.pass(8s, {world.a});
  EXPECT_EQ(world.core->pulls().table().all().size(), 1u) << "progress renews it";
  const NodeInfo q = world.node("q");
  EXPECT_TRUE(world.open(q, "qwen3")->sources.empty());
  world.pass(3s, {world.a});
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
      << "the source in use comes first";
  world.pass(3s, {b});
  EXPECT_THAT(CoreWorld::names(world.progress(p, *pull)->sources), ElementsAre("b"));
  EXPECT_EQ(world.core->pulls().table().all().begin()->second.sources.size(), 1u);
}

TEST(CoordinatorPulls, ARunningPullSurvivesARestartOfTheCoordinator) {
  RunningPull world;
  world.restart();
  const auto early = world.go_on({}, 500);
  ASSERT_TRUE(early) << early.error().message();
  EXPECT_THAT(early->sources, IsEmpty());
  EXPECT_TRUE(early->grace) << "the puller keeps its sources";
  ASSERT_TRUE(world.enroll(world.a));
  ASSERT_TRUE(world.announce(world.a, {CoreWorld::holding(kV1)}));
  EXPECT_THAT(CoreWorld::names(world.go_on({}, 600)->sources), ElementsAre("a"));
  EXPECT_EQ(world.progress(world.node("thief"), *world.pull).error().code(), ErrorCode::kDenied);
}

TEST(CoordinatorPulls, ALateReportDoesNotReopenAClosedPull) {
  RunningPull world;
  const SourceReport bad = quarantine_report(world.a);
  ASSERT_TRUE(world.go_on({bad}));
  world.close(world.pull->pull_id);
  world.pass(9s, {world.a});
  EXPECT_EQ(world.go_on({bad}).error().code(), ErrorCode::kStale);
  EXPECT_EQ(world.core->pulls().table().pullers_of(world.a.incarnation), 0u);
  world.pass(1100ms, {world.a});
  EXPECT_TRUE(world.open(world.node("q"), "qwen3")) << "its strike has not been counted again";
}

TEST(CoordinatorPulls, OnlyThePullerClosesItsPull) {
  RunningPull world;
  const Incarnation thief = world.node("thief").incarnation;
  const auto refused = world.core->close_pull(world.pull->pull_id, thief, world.now);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_TRUE(world.go_on()) << "it runs";
  world.restart();
  ASSERT_TRUE(world.core->close_pull(world.pull->pull_id, thief, world.now))
      << "the pull is unknown";
  EXPECT_TRUE(world.go_on()) << "the close was not from its puller";
  ASSERT_TRUE(world.core->close_pull(world.pull->pull_id, world.p.incarnation, world.now));
  EXPECT_EQ(world.go_on().error().code(), ErrorCode::kStale);
}

TEST(CoordinatorPulls, Row36ASourceThatServedWrongBytesIsQuarantinedWithBackOff) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo p = world.node("p");
  const NodeInfo o = world.node("o");
  const auto pull = world.open(p, "qwen3");
  const auto other = world.open(o, "qwen3");
  const SourceReport bad = quarantine_report(a);
  EXPECT_THAT(CoreWorld::names(world.progress(p, *pull, {bad})->sources), ElementsAre("b"));
  EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.size(), 2u) << "one report is not enough";
  EXPECT_THAT(CoreWorld::names(world.progress(o, *other, {bad})->sources), ElementsAre("b"));
  EXPECT_THAT(world.sources("q"), ElementsAre("b"));
  for (int i = 0; i < 90; ++i) {  // A repeated report adds nothing.
    world.pass(100ms, {a, b});
    ASSERT_TRUE(world.progress(p, *pull, {bad}));
    ASSERT_TRUE(world.progress(o, *other, {bad}));
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
  EXPECT_THAT(world.sources("q"), ElementsAre("b")) << "the second quarantine is twice as long";
  world.pass(6s, {a, b});
  EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.size(), 2u);
}

TEST(CoordinatorPulls, ALostSourceIsSuspectForOthersForAWhile) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  const SourceReport lost = lost_report(a);
  ASSERT_TRUE(world.progress(p, *pull, {lost}));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.back().node.node_id, "a");
  }
  const NodeInfo stranger = world.node("a");  // The same name in another incarnation.
  const SourceReport old = quarantine_report(stranger);
  ASSERT_TRUE(world.progress(p, *pull, {old}));
  EXPECT_EQ(world.open(world.node("q"), "qwen3")->sources.size(), 2u);
}

// Pullers that lack the same tiles would wait for each other although there is a whole copy.
TEST(CoordinatorPulls, APullWithoutACompleteSourceGetsOne) {
  CoreWorld world({.max_sources_per_pull = 2});
  for (const char* name : {"a", "b"}) world.filling(name);
  const NodeInfo first = world.holder("w", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  EXPECT_THAT(CoreWorld::names(pull->sources), ::testing::Contains("w"));
  ASSERT_EQ(pull->sources.size(), 2u);

  // The complete source leaves, other sources take both places, and it comes back.
  world.disconnect(first);
  NodeInfo next = world.node("w");
  const SourceReport lost = lost_report(first);
  ASSERT_TRUE(world.progress(p, *pull, {lost}));
  ASSERT_TRUE(world.enroll(next));
  ASSERT_TRUE(world.announce(next, {CoreWorld::holding(kV1)}));
  const auto answer = world.progress(p, *pull);
  ASSERT_TRUE(answer);
  EXPECT_THAT(CoreWorld::names(answer->sources), ::testing::Contains("w"));
  EXPECT_LE(answer->sources.size(), 2u);
}

TEST(CoordinatorQuarantine, APullerThatFoundAllHoldersBadLearnsWhichAndHowLong) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  ASSERT_TRUE(world.progress(p, *pull, {quarantine_report(a), quarantine_report(b)}));
  const auto refused = world.open(p, "qwen3");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable) << "it may come back";
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("wrong bytes"), HasSubstr("10000 ms"),
                                               HasSubstr("a, b"), HasSubstr("rekindle verify")));
  world.pass(11s, {a, b});
  EXPECT_TRUE(world.open(p, "qwen3"));
}

TEST(CoordinatorQuarantine, OnePullersReportDoesNotKeepOtherPullersOut) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo other = world.node("other");
  const auto running = world.open(other, "qwen3");
  const NodeInfo broken = world.node("broken");
  const auto pull = world.open(broken, "qwen3");
  ASSERT_TRUE(pull && running);
  EXPECT_THAT(world.progress(broken, *pull, {quarantine_report(a), quarantine_report(b)})->sources,
              IsEmpty());
  EXPECT_EQ(world.progress(other, *running)->sources.size(), 2u) << "it goes on";
  const auto opened = world.open(world.node("q"), "qwen3");
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->sources.size(), 2u);
}

TEST(CoordinatorQuarantine, AQuarantinedSourceIsOfferedOnlyWithoutAnotherWholeCopy) {
  RunningPull world;
  const SourceReport bad = quarantine_report(world.a);
  const NodeInfo o = world.node("o");
  const auto other = world.open(o, "qwen3");
  ASSERT_TRUE(world.go_on({bad}));
  ASSERT_TRUE(world.progress(o, *other, {bad}));
  world.filling("growing");
  const auto both = world.open(world.node("q"), "qwen3");
  EXPECT_EQ(both->sources.size(), 2u) << "a node that fills up is no whole copy";
  const NodeInfo b = world.holder("b", kV1);
  const auto others = world.open(world.node("r"), "qwen3");
  EXPECT_THAT(CoreWorld::names(others->sources), UnorderedElementsAre("b", "growing"));
  EXPECT_EQ(world.core->pulls().table().pullers_of(world.a.incarnation), 1u) << "q";
  ASSERT_TRUE(world.core->drain("b", true, world.now));
  EXPECT_THAT(world.sources("s"), UnorderedElementsAre("a", "growing"))
      << "a quarantined source comes before a drained one";
}

TEST(CoordinatorQuarantine, AnUnknownModelIsStillNotFound) {
  RunningPull world;
  const SourceReport bad = quarantine_report(world.a);
  ASSERT_TRUE(world.go_on({bad}));
  world.pass(5s, {world.a});  // The grace is over.
  const auto absent = world.open(world.node("q"), "absent");
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code(), ErrorCode::kNotFound);
}

// A client has read the ids of the holders in the status.
TEST(CoordinatorQuarantine, S6EightInventedPullsHarmNoHonestHolder) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo liar = world.node("liar");
  for (const bool in_grace : {false, true}) {
    SCOPED_TRACE(in_grace);
    if (!in_grace) {
      world.pass(5s, {a, b});
    } else {
      world.restart();
      world.holder("a", kV1);
      world.holder("b", kV1);
    }
    for (std::uint8_t i = 1; i <= 8; ++i) {
      PullId invented;
      invented.bytes.fill(i);
      const SourceReport failed = failed_report(a);
      const auto answer = world.core->pull_progress(
          {invented, liar, kV1, 0, 1000, {failed, quarantine_report(b)}}, world.now);
      if (in_grace) {
        ASSERT_TRUE(answer) << answer.error().message();
      } else {
        ASSERT_FALSE(answer);
        EXPECT_EQ(answer.error().code(), ErrorCode::kStale);
      }
    }
    EXPECT_LE(world.core->pulls().table().all().size(), 1u) << "one process, one pull of a version";
    for (const char* const name : {"a", "b"}) {
      const Member& member = world.core->fleet().members.all().at(name);
      EXPECT_EQ(state_name(member, world.now), "alive");
      EXPECT_EQ(member.standing.health.at(world.now, liar.responsible()), 1);
    }
  }
}

TEST(CoordinatorQuarantine, S6ThePullsOfOnePartyMakeNoSourceSlowForOthers) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const auto& health = world.core->fleet().members.all().at("a").standing.health;
  const auto accuse = [&](const std::string& party) {
    for (int i = 0; i < 12; ++i) {
      NodeInfo liar = world.node(fmt::format("{}{}", party, i));
      liar.party = party;
      const auto pull = world.open(liar, "qwen3");
      ASSERT_TRUE(pull);
      ASSERT_TRUE(world.progress(liar, *pull, {failed_report(a)}));
      ASSERT_TRUE(world.core->close_pull(pull->pull_id, liar.incarnation, world.now));
    }
  };
  accuse("liar");
  EXPECT_TRUE(health.slow(world.now, "liar"));
  EXPECT_FALSE(health.slow(world.now));
  EXPECT_EQ(health.at(world.now, "honest"), 1);
  accuse("another");
  EXPECT_TRUE(health.slow(world.now, "honest")) << "two agree";
}

TEST(CoordinatorPulls, ASourceThatGivesAPartyNothingCostsItNoFurtherPulls) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const auto puller_of = [&](const std::string& party) {
    NodeInfo puller = world.node("p");
    puller.party = party;
    return puller;
  };
  const NodeInfo first = puller_of("host 10.0.0.1");
  const auto pull = world.open(first, "qwen3");
  ASSERT_TRUE(pull);
  ASSERT_EQ(pull->sources.size(), 2u);
  ASSERT_TRUE(world.progress(first, *pull, {lost_report(b)}));
  world.close(pull->pull_id);
  EXPECT_THAT(world.sources(puller_of("host 10.0.0.1")), ElementsAre("a"));
  EXPECT_EQ(world.sources(puller_of("host 10.0.0.2")).size(), 2u) << "one party may lie";
  world.pass(11s, {a, b});
  const NodeInfo again = puller_of("host 10.0.0.1");
  const auto later = world.open(again, "qwen3");
  ASSERT_EQ(later->sources.size(), 2u) << "it may have recovered";
  ASSERT_TRUE(world.progress(again, *later, {lost_report(b)}));
  world.close(later->pull_id);
  world.pass(11s, {a, b});
  EXPECT_THAT(world.sources(puller_of("host 10.0.0.1")), ElementsAre("a")) << "twice as long";
  world.pass(3s, {b});
  EXPECT_THAT(world.sources(puller_of("host 10.0.0.1")), ElementsAre("b")) << "nobody else has it";
}

TEST(CoordinatorPulls, ProgressOfAPullNamesItsVersion) {
  CoreWorld world;
  world.holder("a", kV1);
  world.holder("a2", {"other", 1}, 5);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  const auto answer =
      world.core->pull_progress({pull->pull_id, p, {"other", 1}, 0, 1000, {}}, world.now);
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), ErrorCode::kDenied);
}

TEST(CoordinatorCatalog, AnAnnouncementIsNotLatestAfterAllClaimsAreRetired) {
  CoreWorld world;
  world.holder("old", {"qwen3", 2}, 2);
  const ModelVersion claimed{"qwen3", 5};
  const NodeInfo publisher = world.node("publisher");
  ASSERT_TRUE(world.enroll(publisher));
  const Holding real = CoreWorld::holding(claimed);
  ASSERT_TRUE(world.core->publish("publisher", publisher.incarnation, claimed, real.root,
                                  real.tensor_set, 1000, world.now));
  ASSERT_TRUE(world.announce(publisher, {real}));
  world.holder("member", {"qwen3", UINT64_MAX}, 66);
  ASSERT_TRUE(world.core->retire(claimed, world.now));
  EXPECT_EQ(world.core->latest("qwen3", world.now)->version, 2u) << "older than every claim";
}

TEST(CoordinatorCatalog, ThePartyOfAMemberCanAnnounceOnlySoManyVersions) {
  CoreWorld world({.max_announced_versions = 3});
  std::vector<Holding> many;
  for (std::uint64_t version = 1; version <= 5; ++version) {
    many.push_back(CoreWorld::holding({"qwen3", version}));
  }
  for (const char* const name : {"a", "b"}) {
    NodeInfo node = world.node(name);
    node.party = "host 10.0.0.1";
    ASSERT_TRUE(world.enroll(node));
    const auto conflicts = world.announce(node, many);
    ASSERT_TRUE(conflicts) << conflicts.error().message();
    ASSERT_EQ(conflicts->size(), 2u);
    EXPECT_TRUE(conflicts->front().again);
    EXPECT_THAT(conflicts->front().why, HasSubstr("host 10.0.0.1 has announced 3 versions"));
  }
  EXPECT_EQ(world.core->fleet().catalog.all().size(), 3u);
}

TEST(CoordinatorQuarantine, APartyThatOpensManyPullsCountsAsOne) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  for (int i = 0; i < 8; ++i) {
    NodeInfo liar = world.node("liar");
    liar.party = "spiffe://example.org/rekindle/client/liar";
    const auto pull = world.open(liar, "qwen3");
    ASSERT_TRUE(pull);
    ASSERT_TRUE(world.progress(liar, *pull, {quarantine_report(a)}));
  }
  EXPECT_EQ(state_name(world.core->fleet().members.all().at("a"), world.now), "alive");
  EXPECT_THAT(world.sources("honest"), ElementsAre("a"));
}

TEST(CoordinatorQuarantine, AReportOnASourceThatWasNeverGrantedDoesNotCount) {
  CoreWorld world({.max_sources_per_pull = 1});
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  for (const char* const name : {"p", "o"}) {
    const NodeInfo puller = world.node(name);
    const auto pull = world.open(puller, "qwen3");
    ASSERT_EQ(pull->sources.size(), 1u);
    const bool has_a = pull->sources[0].node.node_id == "a";
    const SourceReport wrong = quarantine_report(has_a ? b : a);
    const SourceReport lost = lost_report(has_a ? b : a);
    ASSERT_TRUE(
        world.core->pull_progress({pull->pull_id, puller, kV1, 0, 1000, {wrong}}, world.now));
    ASSERT_TRUE(
        world.core->pull_progress({pull->pull_id, puller, kV1, 0, 1000, {lost}}, world.now));
  }
  for (const char* const name : {"a", "b"}) {
    EXPECT_EQ(state_name(world.core->fleet().members.all().at(name), world.now), "alive");
    EXPECT_FALSE(world.core->fleet().members.all().at(name).standing.is_lost(world.now));
  }
}

TEST(CoordinatorPulls, S2ANumberThatAMemberMerelyAnnouncesIsNotLatest) {
  CoreWorld world;
  const NodeInfo publisher = world.node("publisher");
  ASSERT_TRUE(world.enroll(publisher));
  const Holding real = CoreWorld::holding(kV1);
  ASSERT_TRUE(world.core->publish("publisher", publisher.incarnation, kV1, real.root,
                                  real.tensor_set, 1000, world.now));
  ASSERT_TRUE(world.announce(publisher, {real}));
  const ModelVersion highest{"qwen3", UINT64_MAX};
  world.holder("member", highest, 66);
  EXPECT_EQ(world.open(world.node("p"), "qwen3")->id, kV1);
  EXPECT_EQ(*world.core->latest("qwen3", world.now), kV1);
  world.restart();
  ASSERT_TRUE(world.enroll(publisher));
  ASSERT_TRUE(world.announce(publisher, {real}));
  EXPECT_EQ(*world.core->latest("qwen3", world.now), kV1) << "the state says who claimed what";
}

TEST(CoordinatorPulls, AMemberWithoutTheRightMakesNoVersionKnown) {
  CoreWorld world;
  world.core->set_may_claim([](const Member& member, const ModelVersion&) -> Result<void> {
    if (member.info.node_id == "trainer") return {};
    return fail(ErrorCode::kDenied, "no line gives {} the right `publish`", member.info.node_id);
  });
  const NodeInfo member = world.node("member");
  ASSERT_TRUE(world.enroll(member));
  const auto conflicts = world.announce(member, {CoreWorld::holding(kV1)});
  ASSERT_TRUE(conflicts);
  ASSERT_EQ(conflicts->size(), 1u);
  EXPECT_THAT((*conflicts)[0].why, HasSubstr("`publish`"));
  EXPECT_TRUE((*conflicts)[0].again) << "the copy stays where it is";
  EXPECT_TRUE(world.disk.versions.empty());
  EXPECT_FALSE(world.core->latest("qwen3", world.now));
  world.holder("trainer", kV1);
  EXPECT_THAT(*world.announce(member, {CoreWorld::holding(kV1)}), IsEmpty());
  EXPECT_EQ(world.open(world.node("p"), "qwen3")->sources.size(), 2u);
}

}  // namespace
}  // namespace rekindle::coordinator
