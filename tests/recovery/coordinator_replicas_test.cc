#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

// The wanted number of whole copies of a version.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kRate = 64 << 20;

class Replicated : public ::testing::Test {
 protected:
  static Limits limits() {
    Limits limits;
    limits.replicas = 2;
    limits.recopy_bytes_per_second = kRate;
    return limits;
  }
  NodeInfo add(const std::string& name, std::uint64_t free, const std::string& domain = "") {
    const NodeInfo node = world_.node(name);
    EXPECT_TRUE(world_.enroll(node, 0, domain));
    world_.free_bytes[name] = free;
    return node;
  }
  std::string fetcher(const ModelVersion& id = kV1) const {
    const auto& tasks = world_.core->replicas().tasks();
    const auto task = tasks.find(id);
    return task == tasks.end() ? "" : task->second.node_id;
  }
  std::string why(const ModelVersion& id = kV1) const {
    const auto& shortages = world_.core->replicas().shortages();
    const auto found = shortages.find(id);
    return found == shortages.end() ? "enough" : found->second.why;
  }
  CoreWorld world_{limits()};
};

TEST_F(Replicated, AVersionWithTooFewCopiesIsFetchedByANodeWithRoom) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo small = add("small", 999);
  const NodeInfo b = add("b", 5000);
  world_.pass(11s, {a, small, b});
  EXPECT_EQ(fetcher(), "");
  EXPECT_TRUE(world_.beat_one(b)->fetch.empty())
      << "it may come back by itself: 2 s of grace, 10 s";
  world_.pass(2s, {a, small, b});
  ASSERT_EQ(fetcher(), "b");
  const auto told = world_.beat_one(b)->fetch;
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].id, kV1);
  EXPECT_EQ(told[0].root, (Digest{1, 7}));
  EXPECT_EQ(told[0].max_bytes_per_second, kRate);
  EXPECT_TRUE(world_.beat_one(a)->fetch.empty());
  EXPECT_TRUE(world_.beat_one(small)->fetch.empty());
  const auto pull = world_.open(b, "qwen3", 1);
  ASSERT_TRUE(pull);
  EXPECT_EQ(pull->sources.at(0).grant.max_bytes_per_second, kRate) << "its share of the source";
  EXPECT_EQ(world_.open(world_.node("p"), "qwen3", 1)->sources.at(0).grant.max_bytes_per_second,
            0u);
  ASSERT_TRUE(world_.announce(b, {CoreWorld::holding(kV1)}));
  world_.pass(1s, {a, small, b});
  EXPECT_EQ(fetcher(), "");
  EXPECT_EQ(why(), "enough");
  EXPECT_TRUE(world_.beat_one(b)->fetch.empty());
}

TEST_F(Replicated, ACopyGoesToAnotherFailureDomainOrNowhere) {
  const NodeInfo a = add("a", 5000, "rack1");
  ASSERT_TRUE(world_.announce(a, {CoreWorld::holding(kV1)}));
  const NodeInfo b = add("b", 9000, "rack1");
  world_.pass(20s, {a, b});
  EXPECT_EQ(fetcher(), "");
  EXPECT_EQ(why(), "no node with room for it in another failure domain");
  const NodeInfo c = add("c", 5000, "rack2");
  world_.pass(1s, {a, b, c});
  EXPECT_EQ(fetcher(), "c");
}

TEST_F(Replicated, TwoCopiesInOneDomainCountOnce) {
  const NodeInfo a = add("a", 0, "rack1");
  const NodeInfo b = add("b", 0, "rack1");
  const NodeInfo c = add("c", 5000, "rack2");
  ASSERT_TRUE(world_.announce(a, {CoreWorld::holding(kV1)}));
  ASSERT_TRUE(world_.announce(b, {CoreWorld::holding(kV1)}));
  world_.pass(20s, {a, b, c});
  EXPECT_EQ(fetcher(), "c");
}

TEST_F(Replicated, ATaskGoesToAnotherNodeWhenItsNodeDiesFailsOrDoesNotGetOn) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = add("b", 5000);
  const NodeInfo c = add("c", 4000);
  world_.pass(13s, {a, b, c});
  ASSERT_EQ(fetcher(), "b") << "more room";
  world_.pass(3s, {a, c});
  EXPECT_EQ(fetcher(), "c") << "b died";
  ASSERT_TRUE(world_.enroll(b));
  ASSERT_TRUE(world_.core->heartbeat(
      "c", c.incarnation, {.store_free_bytes = 4000, .failed_fetches = {kV1}}, world_.now));
  EXPECT_EQ(fetcher(), "");
  world_.pass(1s, {a, b, c});
  EXPECT_EQ(fetcher(), "") << "both are left alone for a minute";
  world_.pass(61s, {a, b, c});
  ASSERT_NE(fetcher(), "");
  const std::string before = fetcher();
  world_.pass(31s, {a, b, c});
  EXPECT_NE(fetcher(), "") << "the other one";
  EXPECT_NE(fetcher(), before) << "no byte in 30 s";
}

TEST_F(Replicated, ANodeThatMakesRoomForACopyKeepsItsTaskForAWhile) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = add("b", 5000);
  world_.pass(13s, {a, b});
  ASSERT_EQ(fetcher(), "b");
  const auto prepare = [&](Duration duration) {
    for (const TimePoint end = world_.now + duration; world_.now < end;) {
      world_.pass(500ms, {a});
      ASSERT_TRUE(world_.core->heartbeat(
          "b", b.incarnation, {.store_free_bytes = 5000, .fetching = {kV1}}, world_.now));
    }
  };
  prepare(300s);
  EXPECT_EQ(fetcher(), "b") << "it says that it is at it";
  prepare(345s);
  EXPECT_EQ(fetcher(), "") << "nothing takes that long";
}

TEST_F(Replicated, ATaskThatHasHadBytesAndGetsNoMoreGoesToAnotherNodeWhateverItsNodeSays) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = add("b", 5000);
  world_.pass(13s, {a, b});
  ASSERT_EQ(fetcher(), "b");
  const auto pull = world_.open(b, "qwen3", 1);
  ASSERT_TRUE(world_.progress(b, *pull, {}, 1));
  for (int i = 0; i < 62; ++i) {
    world_.pass(500ms, {a});
    ASSERT_TRUE(world_.core->heartbeat("b", b.incarnation,
                                       {.store_free_bytes = 5000, .fetching = {kV1}}, world_.now));
  }
  EXPECT_EQ(fetcher(), "");
}

TEST_F(Replicated, ATaskThatGetsOnKeepsItsNode) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = add("b", 5000);
  const NodeInfo c = add("c", 4000);
  world_.pass(13s, {a, b, c});
  ASSERT_EQ(fetcher(), "b");
  const auto pull = world_.open(b, "qwen3", 1);
  for (std::uint64_t done = 1; done < 20; ++done) {
    world_.pass(5s, {a, b, c});
    ASSERT_TRUE(world_.progress(b, *pull, {}, done));
  }
  EXPECT_EQ(fetcher(), "b");
  for (int i = 0; i < 8; ++i) {
    world_.pass(5s, {a, b, c});
    ASSERT_TRUE(world_.progress(b, *pull, {}, 19));
  }
  EXPECT_EQ(fetcher(), "c") << "asking without getting on is no progress";
}

TEST_F(Replicated, ANodeCopiesOneVersionAtATimeAndAVersionHasOneTask) {
  const NodeInfo a = world_.holder("a", kV1);
  ASSERT_TRUE(world_.announce(a, {CoreWorld::holding(kV1), CoreWorld::holding(kV2)}));
  const NodeInfo b = add("b", 5000);
  world_.pass(20s, {a, b});
  EXPECT_EQ(world_.core->replicas().tasks().size(), 1u);
  EXPECT_EQ(world_.beat_one(b)->fetch.size(), 1u);
  const NodeInfo c = add("c", 5000);
  world_.pass(1s, {a, b, c});
  EXPECT_EQ(world_.core->replicas().tasks().size(), 2u);
  EXPECT_NE(fetcher(kV1), fetcher(kV2));
}

TEST_F(Replicated, WhatADrainedNodeHoldsIsCopiedAwayAndMayBeReadForThat) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = add("b", 5000);
  ASSERT_TRUE(world_.core->publish("a", a.incarnation, kV1, {1, 7}, {1, 8}, 1000, world_.now, 1u));
  world_.pass(20s, {a, b});
  EXPECT_EQ(why(), "enough");
  ASSERT_TRUE(world_.core->drain("a", true, world_.now));
  world_.pass(11s, {a, b});
  ASSERT_EQ(fetcher(), "b");
  EXPECT_THAT(CoreWorld::names(world_.open(b, "qwen3", 1)->sources), ElementsAre("a"));
  EXPECT_FALSE(world_.open(world_.node("p"), "qwen3", 1)) << "nobody else reads there";
  ASSERT_TRUE(world_.announce(b, {CoreWorld::holding(kV1)}));
  EXPECT_THAT(world_.core->replicas().sole_copies(world_.core->fleet().members.all().at("a")),
              IsEmpty());
}

TEST_F(Replicated, AVersionSaysHowManyCopiesItWants) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = add("b", 5000);
  const auto publish = [&](std::optional<std::uint32_t> replicas) {
    return world_.core->publish("a", a.incarnation, kV1, {1, 7}, {1, 8}, 1000, world_.now,
                                replicas);
  };
  ASSERT_TRUE(publish(1));
  world_.pass(20s, {a, b});
  EXPECT_EQ(fetcher(), "");
  ASSERT_TRUE(publish({}));
  EXPECT_EQ(world_.disk.versions.at(kV1).replicas, 1u) << "what is not said is not changed";
  ASSERT_TRUE(publish(2));
  world_.pass(11s, {a, b});
  EXPECT_EQ(fetcher(), "b");
  ASSERT_TRUE(world_.core->retire(kV1, world_.now));
  world_.pass(1s, {a, b});
  EXPECT_EQ(fetcher(), "") << "what is retired is not copied";
}

TEST_F(Replicated, AfterARestartNothingIsCopiedBeforeAllCouldReport) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  const NodeInfo c = add("c", 5000);
  world_.pass(15s, {a, b, c});
  EXPECT_EQ(why(), "enough");
  world_.restart();
  for (const NodeInfo& node : {a, c}) ASSERT_TRUE(world_.enroll(node));
  ASSERT_TRUE(world_.announce(a, {CoreWorld::holding(kV1)}));
  world_.pass(8s, {a, c});
  ASSERT_TRUE(world_.enroll(b));
  ASSERT_TRUE(world_.announce(b, {CoreWorld::holding(kV1)}));
  world_.pass(20s, {a, b, c});
  EXPECT_EQ(world_.core->replicas().assigned_count(), 0u);
}

TEST_F(Replicated, WithoutAWholeCopyThereIsNothingToCopy) {
  const NodeInfo a = world_.node("a");
  ASSERT_TRUE(world_.enroll(a));
  ASSERT_TRUE(world_.announce(a, {CoreWorld::holding(kV1, 1, 1, true, /*whole=*/false)}));
  const NodeInfo b = add("b", 5000);
  world_.pass(20s, {a, b});
  EXPECT_EQ(fetcher(), "");
  EXPECT_EQ(why(), "nobody alive has a whole copy to read from");
}

// Nodes that ask whether they may let go of a copy, to make room for a newer version.

class LetGo : public ::testing::Test {
 protected:
  Result<void> ask(const NodeInfo& node, const ModelVersion& id = kV1) {
    return world_.core->let_go(node.node_id, node.incarnation, id, world_.now);
  }
  // "": it may.
  std::string denied(const NodeInfo& node, const ModelVersion& id = kV1) {
    const auto answer = ask(node, id);
    if (answer) return "";
    EXPECT_EQ(answer.error().code(), ErrorCode::kDenied);
    return answer.error().message();
  }
  void announce_only(const NodeInfo& node, std::vector<Holding> holdings) {
    ASSERT_TRUE(world_.announce(node, std::move(holdings), /*full=*/true));
  }
  CoreWorld world_;
};

TEST_F(LetGo, TheLastCopyStays) {
  const NodeInfo a = world_.holder("a", kV1);
  world_.holder("b", kV2);
  EXPECT_EQ(denied(a),
            "qwen3@1 must stay on a: it is the last copy to rely on; other holders: none");
}

TEST_F(LetGo, OfTwoHoldersThatAskTogetherOneMay) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  EXPECT_EQ(denied(a), "");
  EXPECT_THAT(denied(b), HasSubstr("other holders: a (letting go of it, too)"));
  EXPECT_EQ(denied(a), "") << "who has leave may ask again";
}

TEST_F(LetGo, AThirdHolderIsEnoughForBoth) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  const NodeInfo c = world_.holder("c", kV1);
  EXPECT_EQ(denied(a), "");
  EXPECT_EQ(denied(b), "");
  EXPECT_THAT(denied(c), HasSubstr("a (letting go of it, too), b (letting go of it, too)"));
}

TEST_F(LetGo, TheLeaveOfOneVersionIsNoneOfAnother) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  for (const NodeInfo& node : {a, b}) ASSERT_TRUE(world_.announce(node, {CoreWorld::holding(kV2)}));
  EXPECT_EQ(denied(a, kV1), "");
  EXPECT_EQ(denied(b, kV2), "");
  EXPECT_NE(denied(b, kV1), "");
  EXPECT_NE(denied(a, kV2), "");
}

TEST_F(LetGo, TheLeaveEndsWhenTheNodeAnnouncesWithoutTheCopyAndNotBefore) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  ASSERT_EQ(denied(a), "");
  announce_only(a, {CoreWorld::holding(kV1)});
  EXPECT_NE(denied(b), "") << "said before it had the answer";
  announce_only(a, {});
  EXPECT_THAT(denied(b), HasSubstr("other holders: none"));
  announce_only(a, {CoreWorld::holding(kV1)});
  EXPECT_EQ(denied(b), "") << "a has pulled it again";
}

TEST_F(LetGo, TheLeaveEndsAfterAMinute) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  ASSERT_EQ(denied(a), "");
  world_.pass(59s, {a, b});
  EXPECT_NE(denied(b), "");
  world_.pass(1s, {a, b});
  EXPECT_EQ(denied(b), "");
}

TEST_F(LetGo, TimeThatTheCoordinatorSleptDoesNotEndTheLeave) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  ASSERT_EQ(denied(a), "");
  world_.now += 5min;
  EXPECT_NE(denied(b), "");
}

TEST_F(LetGo, TheLeaveEndsWhenTheNodeRegistersAnew) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  ASSERT_EQ(denied(a), "");
  ASSERT_TRUE(world_.enroll(a));
  announce_only(a, {CoreWorld::holding(kV1)});
  EXPECT_EQ(denied(b), "");
}

TEST_F(LetGo, WhoIsDrainedDoesNotKeepItForOthers) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  ASSERT_TRUE(world_.core->drain("b", true, world_.now));
  EXPECT_THAT(denied(a), HasSubstr("other holders: b (drained)"));
  EXPECT_EQ(denied(b), "") << "but it may go itself";
}

TEST_F(LetGo, WhoIsNotHeardOfDoesNotKeepItForOthers) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  world_.pass(1s, {a});
  EXPECT_THAT(denied(a), HasSubstr("other holders: b (not heard of)"));
  ASSERT_TRUE(world_.beat_one(b));
  EXPECT_EQ(denied(a), "");
}

TEST_F(LetGo, WhoseConnectionHasClosedDoesNotKeepItForOthers) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  world_.disconnect(b);
  EXPECT_THAT(denied(a), HasSubstr("other holders: b (not heard of)"));
}

TEST_F(LetGo, WhoServedWrongBytesDoesNotKeepItForOthers) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  const NodeInfo puller = world_.node("p");
  const NodeInfo other = world_.node("o");
  const auto pull = world_.open(puller, "qwen3", 1);
  ASSERT_TRUE(pull);
  const auto second = world_.open(other, "qwen3", 1);
  ASSERT_TRUE(second);
  const SourceReport wrong = quarantine_report(b);
  ASSERT_TRUE(world_.progress(puller, *pull, {wrong}));
  ASSERT_TRUE(world_.progress(other, *second, {wrong}));
  EXPECT_THAT(denied(a), HasSubstr("other holders: b (quarantined)"));
}

TEST_F(LetGo, AShardOrACopyThatIsBeingFilledDoesNotKeepItForOthers) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV2);
  ASSERT_TRUE(world_.announce(b, {CoreWorld::holding(kV1, 1, 1, /*complete=*/false)}));
  ASSERT_TRUE(world_.announce(b, {CoreWorld::holding(kV1, 1, 2, true, /*whole=*/false)}));
  EXPECT_THAT(denied(a), HasSubstr("other holders: none"));
  EXPECT_EQ(denied(b), "") << "a shard goes when somebody has all of it";
}

TEST_F(LetGo, WhatIsRetiredMayGoAlsoWhenItIsTheLast) {
  const NodeInfo a = world_.holder("a", kV1);
  ASSERT_TRUE(world_.core->retire(kV1, world_.now));
  EXPECT_EQ(denied(a), "");
}

TEST_F(LetGo, WhatTheNodeHasNotAnnouncedStays) {
  world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV2);
  EXPECT_THAT(denied(b), HasSubstr("not announced"));
  EXPECT_THAT(denied(b, {"qwen3", 9}), HasSubstr("not announced"));
}

TEST_F(LetGo, WhoIsNotRegisteredHasNoSay) {
  const NodeInfo a = world_.holder("a", kV1);
  world_.holder("b", kV1);
  world_.disconnect(a);
  const auto answer = ask(a);
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), ErrorCode::kStale);
}

}  // namespace
}  // namespace rekindle::coordinator
