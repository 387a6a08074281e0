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

NodeState state_of(const CoreWorld& world, const std::string& name) {
  return world.core->members().all().at(name).state;
}

TEST(CoordinatorMembership, SilenceMakesANodeSuspectThenDead) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  const NodeInfo b = world.node("b");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.enroll(b));
  world.pass(3s, {a, b});  // past the grace
  world.pass(700ms, {b});
  EXPECT_EQ(state_of(world, "a"), NodeState::kAlive);
  world.pass(100ms, {b});
  EXPECT_EQ(state_of(world, "a"), NodeState::kSuspect);
  world.pass(1100ms, {b});
  EXPECT_EQ(state_of(world, "a"), NodeState::kSuspect);
  world.pass(100ms, {b});
  EXPECT_EQ(state_of(world, "a"), NodeState::kDead);
  EXPECT_EQ(state_of(world, "b"), NodeState::kAlive);
}

TEST(CoordinatorMembership, AHeartbeatClearsSuspicionAndADeadNodeMustRegisterAgain) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  world.pass(3s, {a});
  world.pass(1s);
  ASSERT_EQ(state_of(world, "a"), NodeState::kSuspect);
  EXPECT_TRUE(world.core->heartbeat("a", a.incarnation, 0, 0, world.now));
  EXPECT_EQ(state_of(world, "a"), NodeState::kAlive);
  world.pass(3s);
  ASSERT_EQ(state_of(world, "a"), NodeState::kDead);
  const auto late = world.core->heartbeat("a", a.incarnation, 0, 0, world.now);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kStale);
  EXPECT_FALSE(world.announce(a, {CoreWorld::holding(kV1)}));
  ASSERT_TRUE(world.enroll(a));
  EXPECT_EQ(state_of(world, "a"), NodeState::kAlive);
  EXPECT_THAT(world.core->members().all().at("a").holdings, IsEmpty()) << "announced anew";
}

TEST(CoordinatorMembership, TheLiveHolderKeepsItsNodeId) {
  CoreWorld world;
  const NodeInfo first = world.node("a");
  const NodeInfo second = world.node("a");
  ASSERT_TRUE(world.enroll(first));
  const auto refused = world.enroll(second);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_EQ(refused.error().message(),
            "node id 'a' is in use by a live process at a:7400; choose another --node-id");
  EXPECT_TRUE(world.core->heartbeat("a", first.incarnation, 0, 0, world.now));
  EXPECT_EQ(world.core->heartbeat("a", second.incarnation, 0, 0, world.now).error().code(),
            ErrorCode::kStale);
  world.pass(1s);  // suspect only: still the holder
  EXPECT_FALSE(world.enroll(second));
}

TEST(CoordinatorMembership, AClosedConnectionOrDeathFreesTheNodeId) {
  CoreWorld world;
  const NodeInfo first = world.holder("a", kV1);
  const NodeInfo second = world.node("a");
  world.disconnect(first);
  ASSERT_TRUE(world.enroll(second));
  EXPECT_THAT(world.core->members().all().at("a").holdings, IsEmpty())
      << "what the first life held is not the second one's";
  world.disconnect(first);  // late news of the first life
  EXPECT_FALSE(world.core->members().all().at("a").connection.empty());
  const NodeInfo third = world.node("a");
  EXPECT_FALSE(world.enroll(third));
  world.pass(5s);
  EXPECT_TRUE(world.enroll(third)) << "the second is dead";
}

TEST(CoordinatorMembership, TheEndOfAnOlderConnectionDoesNotCount) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.core->enroll(a, "", 0, "connection 1", world.now));
  ASSERT_TRUE(world.core->enroll(a, "", 0, "connection 2", world.now));
  world.core->disconnected("a", a.incarnation, "connection 1", world.now);
  EXPECT_FALSE(world.enroll(world.node("a"))) << "the holder is connected";
  world.core->disconnected("a", a.incarnation, "connection 2", world.now);
  EXPECT_TRUE(world.enroll(world.node("a")));
}

TEST(CoordinatorMembership, ANodeWithoutItsConnectionMustRegisterAgain) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  world.disconnect(a);
  EXPECT_EQ(world.core->heartbeat("a", a.incarnation, 0, 0, world.now).error().code(),
            ErrorCode::kStale);
  ASSERT_TRUE(world.enroll(a));
  EXPECT_TRUE(world.core->heartbeat("a", a.incarnation, 0, 0, world.now));
  EXPECT_EQ(world.core->members().all().at("a").holdings.size(), 1u) << "the same life";
}

TEST(CoordinatorMembership, APauseOfTheCoordinatorKillsNobody) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  world.pass(5s, {a, b});
  world.now += 10s;  // SIGSTOP
  world.core->tick(world.now);
  EXPECT_NE(state_of(world, "a"), NodeState::kDead);
  EXPECT_NE(state_of(world, "b"), NodeState::kDead);
  EXPECT_TRUE(world.core->in_grace(world.now));
  world.pass(1900ms, {a});
  EXPECT_NE(state_of(world, "b"), NodeState::kDead) << "one TTL of grace";
  world.pass(1s, {a});
  EXPECT_EQ(state_of(world, "a"), NodeState::kAlive);
  EXPECT_EQ(state_of(world, "b"), NodeState::kDead) << "then silence counts again";
}

TEST(CoordinatorMembership, AShortPauseDoesNotCountAsSilence) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  world.pass(5s, {a});
  world.pass(300ms);
  world.now += 1900ms;  // with the silence before it would be more than the TTL
  world.core->tick(world.now);
  EXPECT_NE(state_of(world, "a"), NodeState::kDead);
}

TEST(CoordinatorMembership, NobodyDiesInTheGraceAfterAStart) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  world.pass(1900ms);
  EXPECT_NE(state_of(world, "a"), NodeState::kDead);
}

TEST(CoordinatorEpoch, EachReignIsAboveTheLastAndAboveWhatAgentsSaw) {
  CoreWorld world;
  EXPECT_EQ(world.core->epoch(), 1u);
  world.restart();
  EXPECT_EQ(world.core->epoch(), 2u);
  const auto registered = world.enroll(world.node("a"), 41);
  ASSERT_TRUE(registered);
  EXPECT_EQ(registered->epoch, 42u);
  EXPECT_EQ(world.disk.epoch, 42u) << "durable before it is told";
  EXPECT_EQ(world.enroll(world.node("b"), 42)->epoch, 42u);
}

TEST(CoordinatorEpoch, AnAgentFromALaterReignMustRegisterAgain) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  EXPECT_EQ(world.core->heartbeat("a", a.incarnation, 9, 0, world.now).error().code(),
            ErrorCode::kStale);
  EXPECT_EQ(world.enroll(a, 9)->epoch, 10u);
  EXPECT_TRUE(world.core->heartbeat("a", a.incarnation, 9, 0, world.now));
}

TEST(CoordinatorEpoch, WithoutADiskNoEpochIsTold) {
  CoreWorld world;
  world.disk_fails = true;
  EXPECT_FALSE(world.enroll(world.node("a"), 41));
  EXPECT_EQ(world.core->epoch(), 1u);
}

TEST(CoordinatorCatalog, AVersionHasOneRootForEver) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  const auto publish = [&](const ModelVersion& id, std::uint64_t root) {
    return world.core->publish("a", a.incarnation, id, {root, 7}, {root, 8}, 1000, world.now);
  };
  EXPECT_TRUE(publish(kV1, 1));
  EXPECT_TRUE(publish(kV1, 1)) << "the same claim again";
  const auto other = publish(kV1, 2);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(other.error().message(), HasSubstr("new version"));
  world.restart();
  ASSERT_TRUE(world.enroll(a));
  EXPECT_EQ(publish(kV1, 2).error().code(), ErrorCode::kDenied) << "after a restart, too";
}

TEST(CoordinatorCatalog, AClaimThatIsNotDurableIsNotMade) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  world.disk_fails = true;
  EXPECT_FALSE(world.core->publish("a", a.incarnation, kV1, {1, 7}, {1, 8}, 1, world.now));
  EXPECT_EQ(world.core->catalog().find(kV1), nullptr);
  EXPECT_FALSE(world.announce(a, {CoreWorld::holding(kV1)}));
  world.disk_fails = false;
  EXPECT_TRUE(world.core->publish("a", a.incarnation, kV1, {2, 7}, {2, 8}, 1, world.now));
}

TEST(CoordinatorCatalog, AVersionIsReadyWhenSomeoneHoldsEveryTensor) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.core->publish("a", a.incarnation, kV1, {1, 7}, {1, 8}, 1000, world.now));
  const auto state = [&] { return world.core->catalog().state_of(kV1, world.core->members()); };
  EXPECT_EQ(state(), VersionState::kStaging);
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1, 1, 1, /*complete=*/false)}));
  EXPECT_EQ(state(), VersionState::kStaging) << "partial";
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1, 1, 2, true, /*whole=*/false)}));
  EXPECT_EQ(state(), VersionState::kStaging) << "a shard";
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  EXPECT_EQ(state(), VersionState::kReady);
  world.pass(5s);
  EXPECT_EQ(state(), VersionState::kStaging) << "its only holder died";
}

TEST(CoordinatorCatalog, ACopyWithAnotherRootIsNeverOffered) {
  CoreWorld world;
  world.holder("a", kV1, 1);
  const NodeInfo b = world.node("b");
  ASSERT_TRUE(world.enroll(b));
  const auto conflicts =
      world.announce(b, {CoreWorld::holding(kV1, 2), CoreWorld::holding(kV2, 2)});
  ASSERT_TRUE(conflicts);
  ASSERT_EQ(conflicts->size(), 1u);
  EXPECT_EQ(conflicts->front().id, kV1);
  EXPECT_THAT(CoreWorld::names(world.open(world.node("p"), "qwen3", 1)->sources), ElementsAre("a"));
  EXPECT_THAT(CoreWorld::names(world.open(world.node("p"), "qwen3", 2)->sources), ElementsAre("b"))
      << "the rest of the announcement counts";
}

TEST(CoordinatorCatalog, APartialCopyDoesNotClaimAVersion) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1, 3, 1, /*complete=*/false)}));
  EXPECT_EQ(world.core->catalog().find(kV1), nullptr);
}

TEST(CoordinatorCatalog, RetiredVersionsAreToldInHeartbeatsUntilTheyAreGone) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  world.holder("b", kV2);
  EXPECT_EQ(*world.core->retire(kV1, world.now), 1u);
  EXPECT_THAT(world.core->heartbeat("a", a.incarnation, 0, 0, world.now)->retire, ElementsAre(kV1));
  EXPECT_THAT(world.core->heartbeat("a", a.incarnation, 0, 0, world.now)->retire, ElementsAre(kV1));
  ASSERT_TRUE(world.core->announce("a", a.incarnation, 0, false, {}, {{kV1, {1, 9}}}, world.now));
  EXPECT_THAT(world.core->heartbeat("a", a.incarnation, 0, 0, world.now)->retire, IsEmpty());
  EXPECT_EQ(world.core->retire({"qwen3", 77}, world.now).error().code(), ErrorCode::kNotFound);
}

TEST(CoordinatorCatalog, ARetiredVersionStaysRetiredWhenALateCopyComes) {
  CoreWorld world;
  world.holder("a", kV1);
  world.holder("b", kV2);
  ASSERT_TRUE(world.core->retire(kV2, world.now));
  EXPECT_EQ(world.open(world.node("p"), "qwen3")->id, kV1) << "latest skips it";
  world.restart();
  const NodeInfo b = world.holder("b", kV2);
  EXPECT_THAT(world.core->heartbeat("b", b.incarnation, 0, 0, world.now)->retire, ElementsAre(kV2));
  const auto pull = world.open(world.node("p"), "qwen3", 2);
  ASSERT_FALSE(pull);
  EXPECT_EQ(pull.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(pull.error().message(), HasSubstr("retired"));
  ASSERT_TRUE(world.core->publish("b", b.incarnation, kV2, {1, 7}, {1, 8}, 1000, world.now));
  EXPECT_THAT(world.core->heartbeat("b", b.incarnation, 0, 0, world.now)->retire, IsEmpty())
      << "published again on purpose";
}

}  // namespace
}  // namespace rekindle::coordinator
