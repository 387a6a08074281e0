#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"

// Nodes that ask whether they may let go of a copy, to make room for a newer version.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::HasSubstr;

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
  const auto pull = world_.open(puller, "qwen3", 1);
  ASSERT_TRUE(pull);
  SourceReport wrong = report(b);
  wrong.quarantine = true;
  ASSERT_TRUE(world_.progress(puller, *pull, {wrong}));
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
