#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

// Draining, flapping, readers before a retire, health, who waits.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

TEST(CoordinatorDrain, ADrainedNodeGetsNoNewPlansAndItsReadersFinish) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto running = world.open(p, "qwen3");
  ASSERT_TRUE(running);
  const NodeInfo b = world.holder("b", kV1);
  const auto draining = world.core->drain("a", true, world.now);
  ASSERT_TRUE(draining);
  EXPECT_EQ(draining->readers, 1u);
  EXPECT_THAT(world.sources("q"), ElementsAre("b"));
  EXPECT_THAT(CoreWorld::names(world.progress(p, *running)->sources), ElementsAre("a", "b"))
      << "who reads there goes on";
  EXPECT_TRUE(world.beat_one(a)->drained);
  EXPECT_FALSE(world.beat_one(b)->drained);
  world.close(running->pull_id);
  EXPECT_EQ(world.core->pulls().table().pullers_of(a.incarnation), 0u);
  ASSERT_TRUE(world.core->drain("a", false, world.now));
  EXPECT_THAT(world.sources("r"), UnorderedElementsAre("a", "b"));
}

TEST(CoordinatorDrain, ANodeStaysDrainedOverItsRestartsAndOurs) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  ASSERT_TRUE(world.core->drain("a", true, world.now));
  world.disconnect(a);
  world.holder("a", kV1);
  EXPECT_FALSE(world.open(world.node("p"), "qwen3", 1));
  world.restart();
  const NodeInfo again = world.holder("a", kV1);
  EXPECT_TRUE(world.beat_one(again)->drained);
  EXPECT_FALSE(world.open(world.node("p"), "qwen3", 1));
}

TEST(CoordinatorDrain, WhatAFailedWriteLeftOnTheDiskIsWrittenOverByTheNextWord) {
  CoreWorld world;
  world.holder("a", kV1);
  world.fails_after_writing = true;
  EXPECT_FALSE(world.core->drain("a", true, world.now));
  EXPECT_TRUE(world.disk.drained.contains("a"));
  world.fails_after_writing = false;
  ASSERT_TRUE(world.core->drain("a", false, world.now)) << "as it is, for all that the core knows";
  EXPECT_FALSE(world.disk.drained.contains("a"));
  world.disk_fails = true;
  EXPECT_TRUE(world.core->drain("a", false, world.now)) << "nothing to write now";
}

TEST(CoordinatorRetire, WhatAFailedWriteRevivedIsRetiredOnTheDiskToo) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  ASSERT_TRUE(world.core->retire(kV1, world.now));
  world.fails_after_writing = true;
  EXPECT_FALSE(world.core->publish("a", a.incarnation, kV1, {1, 7}, {1, 8}, 1000, world.now));
  EXPECT_FALSE(world.disk.versions.at(kV1).retiring);
  world.fails_after_writing = false;
  ASSERT_TRUE(world.core->retire(kV1, world.now));
  EXPECT_TRUE(world.disk.versions.at(kV1).retiring);
}

TEST(CoordinatorDrain, WhatOnlyDrainedNodesHoldIsNamed) {
  CoreWorld world;
  world.holder("a", kV1);
  world.holder("b", kV2);
  EXPECT_THAT(world.core->drain("a", true, world.now)->sole_copies, ElementsAre(kV1));
  const auto refused = world.open(world.node("p"), "qwen3", 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("drained nodes hold it: a"),
                                               HasSubstr("rekindle drain NODE --undo")));
}

TEST(CoordinatorDrain, ANodeThatNobodyKnowsIsRefusedAndNothingIsWritten) {
  CoreWorld world;
  const int writes = world.writes;
  EXPECT_EQ(world.core->drain("ghost", true, world.now).error().code(), ErrorCode::kNotFound);
  world.holder("a", kV1);
  world.disk_fails = true;
  EXPECT_FALSE(world.core->drain("a", true, world.now)) << "it would be forgotten";
  EXPECT_TRUE(world.open(world.node("p"), "qwen3", 1)) << "and so it is not done";
  EXPECT_EQ(world.writes, writes + 1) << "the claim of the version only";
}

class Flaps : public ::testing::Test {
 protected:
  // Its process ends and another one takes its place.
  void restart_a() {
    world_.disconnect(a_);
    a_ = world_.holder("a", kV1);
  }
  std::vector<std::string> offered() {
    const auto opened = world_.open(world_.node("p"), "qwen3");
    return opened ? CoreWorld::names(opened->sources) : std::vector<std::string>();
  }
  CoreWorld world_;
  NodeInfo a_ = world_.holder("a", kV1);
  NodeInfo b_ = world_.holder("b", kV1);
};

TEST_F(Flaps, Row36ANodeThatDiedTwiceWithinAMinuteIsLeftOutTwiceAsLongEachTime) {
  world_.pass(3s, {a_, b_});
  restart_a();
  EXPECT_THAT(offered(), Contains("a")) << "one death is none of these";
  world_.pass(5s, {a_, b_});
  for (const auto out : {10s, 20s, 40s}) {
    restart_a();
    EXPECT_THAT(offered(), ElementsAre("b"));
    world_.pass(out - 100ms, {a_, b_});
    EXPECT_THAT(offered(), ElementsAre("b"));
    world_.pass(200ms, {a_, b_});
    EXPECT_THAT(offered(), UnorderedElementsAre("a", "b"));
  }
  world_.pass(11min, {a_, b_});
  restart_a();
  world_.pass(5s, {a_, b_});
  restart_a();
  world_.pass(10100ms, {a_, b_});
  EXPECT_THAT(offered(), Contains("a")) << "after a long calm it begins anew";
}

TEST_F(Flaps, Row36TheTimeOutIsNeverMoreThanTenMinutes) {
  for (int i = 0; i < 40; ++i) {
    world_.pass(5s, {a_, b_});
    restart_a();
  }
  EXPECT_THAT(offered(), ElementsAre("b"));
  world_.pass(10min + 200ms, {a_, b_});
  EXPECT_THAT(offered(), Contains("a"));
}

TEST_F(Flaps, Row36DyingBySilenceCountsOnceThoughAnotherTakesThePlace) {
  world_.pass(3s, {a_, b_});
  world_.pass(5s, {b_});
  a_ = world_.holder("a", kV1);
  EXPECT_THAT(offered(), Contains("a"));
}

TEST_F(Flaps, Row36WhoFlapsIsBetterThanNobody) {
  world_.pass(3s, {a_, b_});
  restart_a();
  restart_a();
  EXPECT_THAT(offered(), ElementsAre("b"));
  world_.disconnect(b_);
  world_.pass(3s, {a_});
  EXPECT_THAT(offered(), ElementsAre("a"));
}

TEST_F(Flaps, Row36ItsPullsAndThoseThatReadThereGoOn) {
  world_.pass(3s, {a_, b_});
  restart_a();
  const NodeInfo p = world_.node("p");
  const auto pull = world_.open(p, "qwen3");
  ASSERT_THAT(CoreWorld::names(pull->sources), Contains("a"));
  world_.holder("c", kV2);
  EXPECT_TRUE(world_.open(a_, "qwen3", 2)) << "it still gets what its workers need";
}

TEST(CoordinatorRetire, AHolderIsToldToLetGoWhenItSaysThatNobodyReadsAndNobodyWasSentThere) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(world.core->retire(kV1, world.now));
  EXPECT_THAT(world.beat_with_readers(a, kV1, 0)->retire, IsEmpty()) << "a pull was sent there";
  EXPECT_EQ(world.open(world.node("q"), "qwen3", 1).error().code(), ErrorCode::kNotFound);
  EXPECT_FALSE(world.progress(p, *pull)->sources.empty()) << "it finishes";
  world.close(pull->pull_id);
  EXPECT_THAT(world.beat_with_readers(a, kV1, 1)->retire, IsEmpty()) << "a worker has it mapped";
  EXPECT_THAT(world.beat_with_readers(a, kV1, 1)->retiring, ElementsAre(kV1));
  const auto answer = world.beat_with_readers(a, kV1, 0);
  EXPECT_THAT(answer->retire, ElementsAre(kV1));
  EXPECT_THAT(answer->retiring, IsEmpty());
}

TEST(CoordinatorRetire, WhatIsPublishedAgainIsNotLetGoOnAnOldWord) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  ASSERT_TRUE(world.core->retire(kV1, world.now));
  ASSERT_THAT(world.beat_with_readers(a, kV1, 1)->retiring, ElementsAre(kV1));
  ASSERT_TRUE(world.core->publish("a", a.incarnation, kV1, {1, 7}, {1, 8}, 1000, world.now));
  const auto answer = world.beat_with_readers(a, kV1, 0);
  EXPECT_THAT(answer->retire, IsEmpty());
  EXPECT_THAT(answer->retiring, IsEmpty());
  EXPECT_TRUE(world.open(world.node("p"), "qwen3"));
}

SourceReport rate_of(const NodeInfo& source, std::uint64_t bytes, double rate) {
  SourceReport result = report(source);
  result.bytes = bytes;
  result.goodput_bytes_per_second = rate;
  return result;
}

TEST(CoordinatorHealth, ASourceThatIsSlowBesideOthersComesLast) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo c = world.holder("c", kV1);
  // One puller alone may have a bad link to b.
  for (const char* const name : {"p", "o"}) {
    const NodeInfo p = world.node(name);
    const auto pull = world.open(p, "qwen3");
    for (std::uint64_t i = 1; i <= 10; ++i) {
      ASSERT_TRUE(world.progress(
          p, *pull, {rate_of(a, i * 10, 1e9), rate_of(b, i, 1e7), rate_of(c, i * 10, 0.9e9)}));
    }
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(world.sources("q").back(), "b");
  }
  EXPECT_LT(world.core->fleet().members.all().at("b").standing.health.at(world.now), 0.25);
  world.pass(3min, {a, b, c});
  EXPECT_FALSE(world.core->fleet().members.all().at("b").standing.health.slow(world.now))
      << "another try";
}

TEST(CoordinatorHealth, NeitherRepeatedNorAbsurdReportsAndNoLoneSourceAreJudged) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(world.progress(p, *pull, {rate_of(a, 10, 1e9), rate_of(b, 10, 1e9)}));
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(world.progress(p, *pull, {rate_of(a, 10, 1e9), rate_of(b, 10, 1)}));
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  ASSERT_TRUE(world.progress(p, *pull, {rate_of(a, 20, nan), rate_of(b, 20, -1)}));
  ASSERT_TRUE(world.progress(p, *pull, {rate_of(b, 30, 1)}));
  const auto& health = world.core->fleet().members.all().at("b").standing.health;
  EXPECT_EQ(health.at(world.now, p.responsible()), 1.0);
}

TEST(CoordinatorHealth, ServingManyIsNotBeingSlow) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  for (int i = 0; i < 7; ++i) {
    ASSERT_TRUE(world.open(world.node(fmt::format("p{}", i)), "qwen3"));
  }
  const NodeInfo b = world.holder("b", kV1);
  const NodeInfo q = world.node("q");
  const auto pull = world.open(q, "qwen3");
  for (std::uint64_t i = 1; i <= 20; ++i) {
    ASSERT_TRUE(world.progress(q, *pull, {rate_of(a, i, 1e9 / 8), rate_of(b, i, 1e9)}));
  }
  const auto& health = world.core->fleet().members.all().at("a").standing.health;
  EXPECT_FALSE(health.slow(world.now, q.responsible()));
}

class Waits : public ::testing::Test {
 protected:
  static Limits limits() {
    Limits limits;
    limits.max_pullers_per_source = 2;
    return limits;
  }
  bool gets(const NodeInfo& node) {
    const auto opened = world_.open(node, "qwen3");
    EXPECT_TRUE(opened);
    if (opened->sources.empty()) return false;
    got_.push_back(*opened);
    return true;
  }
  CoreWorld world_{limits()};
  NodeInfo a_ = world_.holder("a", kV1);
  std::vector<OpenedPull> got_;
};

TEST_F(Waits, WhoWaitsLongestComesFirst) {
  ASSERT_TRUE(gets(world_.node("p")));
  ASSERT_TRUE(gets(world_.node("q")));
  const NodeInfo first = world_.node("first");
  const NodeInfo second = world_.node("second");
  EXPECT_FALSE(gets(first));
  EXPECT_FALSE(gets(second));
  EXPECT_EQ(world_.core->pulls().waiting(), 2u);
  world_.close(got_[0].pull_id);
  EXPECT_FALSE(gets(world_.node("newcomer"))) << "it would take the place of those that wait";
  EXPECT_FALSE(gets(second));
  EXPECT_TRUE(gets(first));
  world_.close(got_[1].pull_id);
  EXPECT_TRUE(gets(second));
}

TEST_F(Waits, WhoDoesNotAskAgainLosesItsPlace) {
  ASSERT_TRUE(gets(world_.node("p")));
  ASSERT_TRUE(gets(world_.node("q")));
  EXPECT_FALSE(gets(world_.node("gone")));
  world_.close(got_[0].pull_id);
  EXPECT_FALSE(gets(world_.node("late")));
  world_.pass(4s, {a_});
  EXPECT_TRUE(gets(world_.node("late")));
}

TEST_F(Waits, ARunningPullTakesNoMoreWhileOthersHaveNothing) {
  const NodeInfo p = world_.node("p");
  ASSERT_TRUE(gets(p));
  ASSERT_TRUE(gets(world_.node("q")));
  EXPECT_FALSE(gets(world_.node("waits")));
  world_.holder("b", kV1);
  EXPECT_THAT(CoreWorld::names(world_.progress(p, got_[0])->sources), ElementsAre("a"));
  EXPECT_TRUE(gets(world_.node("waits2"))) << "two shares are free, one is for who waits longer";
}

TEST_F(Waits, AfterARestartWhatPullersReadFromIsTheirsAgain) {
  const NodeInfo p = world_.node("p");
  ASSERT_TRUE(gets(p));
  world_.restart();
  ASSERT_TRUE(world_.enroll(a_));
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV1)}));
  ASSERT_TRUE(world_.core->drain("a", true, world_.now));
  EXPECT_THAT(CoreWorld::names(world_.progress(p, got_[0], {report(a_)})->sources),
              ElementsAre("a"))
      << "though it is drained by now";
}

}  // namespace
}  // namespace rekindle::coordinator
