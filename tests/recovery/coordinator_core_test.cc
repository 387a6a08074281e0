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

NodeState state_of(const CoreWorld& world, const std::string& name) {
  return world.core->fleet().members.all().at(name).state;
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

TEST(CoordinatorMembership, Row30AHeartbeatClearsSuspicionAndADeadNodeMustRegisterAgain) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  world.pass(3s, {a});
  world.pass(1s);
  ASSERT_EQ(state_of(world, "a"), NodeState::kSuspect);
  EXPECT_TRUE(world.core->heartbeat("a", a.incarnation, {.epoch = 0}, world.now));
  EXPECT_EQ(state_of(world, "a"), NodeState::kAlive);
  world.pass(3s);
  ASSERT_EQ(state_of(world, "a"), NodeState::kDead);
  const auto late = world.core->heartbeat("a", a.incarnation, {.epoch = 0}, world.now);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kStale);
  EXPECT_FALSE(world.announce(a, {CoreWorld::holding(kV1)}));
  ASSERT_TRUE(world.enroll(a));
  EXPECT_EQ(state_of(world, "a"), NodeState::kAlive);
  EXPECT_THAT(world.core->fleet().members.all().at("a").holdings.all(), IsEmpty())
      << "announced anew";
}

TEST(CoordinatorMembership, Row33TheLiveHolderKeepsItsNodeId) {
  CoreWorld world;
  const NodeInfo first = world.node("a");
  const NodeInfo second = world.node("a");
  ASSERT_TRUE(world.enroll(first));
  const auto refused = world.enroll(second);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_EQ(refused.error().message(),
            "node id 'a' is in use by a live process at a:7400; choose another --node-id");
  EXPECT_TRUE(world.core->heartbeat("a", first.incarnation, {.epoch = 0}, world.now));
  EXPECT_EQ(world.core->heartbeat("a", second.incarnation, {.epoch = 0}, world.now).error().code(),
            ErrorCode::kStale);
  world.pass(1s);  // suspect only: still the holder
  EXPECT_FALSE(world.enroll(second));
}

TEST(CoordinatorMembership, TheOwnerOfANodeIdHasItBackFromASharedCertificate) {
  CoreWorld world;
  NodeInfo shared = world.node("a");
  shared.party = "host 10.0.0.66";
  NodeInfo owner = world.node("a");
  owner.party = "spiffe://example.org/rekindle/agent/a";
  owner.owns_node_id = true;
  ASSERT_TRUE(world.enroll(shared));
  ASSERT_TRUE(world.announce(shared, {CoreWorld::holding(kV1)}));
  ASSERT_TRUE(world.enroll(owner));
  EXPECT_THAT(world.core->fleet().members.all().at("a").holdings.all(), IsEmpty());
  EXPECT_EQ(world.core->heartbeat("a", shared.incarnation, {.epoch = 0}, world.now).error().code(),
            ErrorCode::kStale);
  EXPECT_EQ(world.enroll(shared).error().code(), ErrorCode::kDenied);
  NodeInfo second = world.node("a");
  second.party = owner.party;
  second.owns_node_id = true;
  EXPECT_EQ(world.enroll(second).error().code(), ErrorCode::kDenied) << "it is in use";
}

TEST(CoordinatorMembership, Row30AClosedConnectionOrDeathFreesTheNodeId) {
  CoreWorld world;
  const NodeInfo first = world.holder("a", kV1);
  const NodeInfo second = world.node("a");
  world.disconnect(first);
  ASSERT_TRUE(world.enroll(second));
  EXPECT_THAT(world.core->fleet().members.all().at("a").holdings.all(), IsEmpty())
      << "what the first life held is not the second one's";
  world.disconnect(first);  // late news of the first life
  EXPECT_FALSE(world.core->fleet().members.all().at("a").connection.empty());
  const NodeInfo third = world.node("a");
  EXPECT_FALSE(world.enroll(third));
  world.pass(5s);
  EXPECT_TRUE(world.enroll(third)) << "the second is dead";
}

TEST(CoordinatorMembership, S3AStolenIncarnationFromAnotherHostTakesNoNodeOver) {
  CoreWorld world;
  NodeInfo a = world.node("a");
  a.party = "host 10.0.0.3";
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  NodeInfo thief = a;
  thief.party = "host 10.0.0.66";
  thief.control_endpoint = "10.0.0.66:7400";
  EXPECT_EQ(world.enroll(thief).error().code(), ErrorCode::kDenied);
  const Member& member = world.core->fleet().members.all().at("a");
  EXPECT_EQ(member.info.control_endpoint, "a:7400");
  EXPECT_EQ(member.holdings.all().size(), 1u) << "it keeps its copies";
  world.disconnect(a);
  EXPECT_EQ(world.enroll(thief).error().code(), ErrorCode::kUnavailable)
      << "its owner may come back at once, and nobody else";
  EXPECT_EQ(world.core->fleet().members.all().at("a").holdings.all().size(), 1u);
  ASSERT_TRUE(world.enroll(a));
}

TEST(CoordinatorMembership, AnotherHostGetsANodeIdOnceItsHolderIsSilent) {
  CoreWorld world;
  NodeInfo a = world.node("a");
  a.party = "host 10.0.0.3";
  ASSERT_TRUE(world.enroll(a));
  NodeInfo moved = world.node("a");
  moved.party = "host 10.0.0.4";
  world.disconnect(a);
  EXPECT_EQ(world.enroll(moved).error().code(), ErrorCode::kUnavailable);
  world.pass(1s);
  EXPECT_TRUE(world.enroll(moved));
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
  EXPECT_EQ(world.core->heartbeat("a", a.incarnation, {.epoch = 0}, world.now).error().code(),
            ErrorCode::kStale);
  ASSERT_TRUE(world.enroll(a));
  EXPECT_TRUE(world.core->heartbeat("a", a.incarnation, {.epoch = 0}, world.now));
  EXPECT_EQ(world.core->fleet().members.all().at("a").holdings.all().size(), 1u) << "the same life";
}

TEST(CoordinatorMembership, Row31APauseOfTheCoordinatorKillsNobody) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", kV1);
  world.pass(5s, {a, b});
  world.now += 10s;  // SIGSTOP
  world.core->tick(world.now);
  EXPECT_NE(state_of(world, "a"), NodeState::kDead);
  EXPECT_NE(state_of(world, "b"), NodeState::kDead);
  EXPECT_TRUE(world.core->fleet().grace.active(world.now));
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

TEST(CoordinatorEpoch, Row28EachTermIsAboveTheLastAndAboveWhatAgentsSaw) {
  CoreWorld world;
  EXPECT_EQ(world.core->fleet().epoch(), 1u);
  world.restart();
  EXPECT_EQ(world.core->fleet().epoch(), 2u);
  const auto registered = world.enroll(world.node("a"), 41);
  ASSERT_TRUE(registered);
  EXPECT_EQ(registered->epoch, 42u);
  EXPECT_EQ(world.disk.epoch, 42u) << "durable before it is told";
  EXPECT_EQ(world.enroll(world.node("b"), 42)->epoch, 42u);
}

TEST(CoordinatorEpoch, Row28AnAgentFromALaterTermMustRegisterAgain) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  EXPECT_EQ(world.core->heartbeat("a", a.incarnation, {.epoch = 9}, world.now).error().code(),
            ErrorCode::kStale);
  EXPECT_EQ(world.enroll(a, 9)->epoch, 10u);
  EXPECT_TRUE(world.core->heartbeat("a", a.incarnation, {.epoch = 9}, world.now));
}

TEST(CoordinatorEpoch, AnAgentCannotUseTheEpochsUp) {
  CoreWorld world;
  const std::uint64_t step = std::uint64_t{1} << 32;
  EXPECT_FALSE(world.enroll(world.node("liar"), world.core->fleet().epoch() + step));
  EXPECT_EQ(world.enroll(world.node("far"), world.core->fleet().epoch() + step - 1)->epoch,
            step + 1);
  for (const std::uint64_t absurd : {2 * step + 1, (std::uint64_t{1} << 62) - 1, UINT64_MAX}) {
    const auto refused = world.enroll(world.node("liar"), absurd);
    ASSERT_FALSE(refused) << absurd;
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(refused.error().message(), HasSubstr(std::to_string(absurd)));
    EXPECT_THAT(refused.error().message(), HasSubstr("agent/epoch"));
  }
  EXPECT_EQ(world.core->fleet().epoch(), step + 1);

  DurableState last;
  last.epoch = (std::uint64_t{1} << 62) - 4;
  CoreWorld late({}, last);
  EXPECT_FALSE(late.enroll(late.node("liar"), (std::uint64_t{1} << 62) - 1));
  EXPECT_EQ(late.core->fleet().epoch(), (std::uint64_t{1} << 62) - 3);
}

TEST(CoordinatorEpoch, Row28WithoutADiskNoEpochIsTold) {
  CoreWorld world;
  world.disk_fails = true;
  EXPECT_FALSE(world.enroll(world.node("a"), 41));
  EXPECT_EQ(world.core->fleet().epoch(), 1u);
}

TEST(CoordinatorCatalog, AVersionHasOneRootForEver) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  const auto publish = [&](const ModelVersion& id, std::uint64_t root) {
    return world.core->publish("a", a.incarnation, id, test::numbered_digest(root, 7),
                               test::numbered_digest(root, 8), 1000, world.now);
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
  EXPECT_EQ(world.core->fleet().catalog.find(kV1), nullptr);
  const auto announced = world.announce(a, {CoreWorld::holding(kV1)});
  ASSERT_TRUE(announced);
  ASSERT_EQ(announced->size(), 1u);
  EXPECT_TRUE(announced->front().again);
  EXPECT_TRUE(world.core->fleet().members.all().at("a").holdings.all().empty());
  world.disk_fails = false;
  EXPECT_TRUE(world.core->publish("a", a.incarnation, kV1, {2, 7}, {2, 8}, 1, world.now));
}

TEST(CoordinatorCatalog, AClaimThatIsNotDurableLeavesTheRestOfTheAnnouncementWhole) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const Holding partial = CoreWorld::holding({"qwen3", 2}, 1, 1, /*complete=*/false);
  ASSERT_TRUE(world.announce(a, {partial, CoreWorld::holding({"qwen3", 3})}));
  world.disk_fails = true;
  const auto announced = world.announce(
      a,
      {CoreWorld::holding({"other", 1}), CoreWorld::holding({"qwen3", 2}), CoreWorld::holding(kV1)},
      /*full=*/true);
  ASSERT_TRUE(announced) << announced.error().message();
  ASSERT_EQ(announced->size(), 2u);
  EXPECT_TRUE(announced->at(0).again && announced->at(1).again);
  const auto& holdings = world.core->fleet().members.all().at("a").holdings.all();
  ASSERT_EQ(holdings.size(), 2u) << "what it no longer names is gone";
  EXPECT_TRUE(holdings.at({kV1, {1, 9}}).complete);
  EXPECT_FALSE(holdings.at({{"qwen3", 2}, {1, 9}}).complete) << "as it was before";
  world.disk_fails = false;
  const auto again = world.announce(a, {CoreWorld::holding({"qwen3", 2})});
  ASSERT_TRUE(again);
  EXPECT_TRUE(again->empty());
  EXPECT_TRUE(world.open(world.node("p"), "qwen3", 2));
}

TEST(CoordinatorCatalog, InTheGraceLatestIsNotKnownWhileItsHoldersHaveYetToReport) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.holder("b", {"qwen3", 2});
  EXPECT_EQ(world.core->latest("qwen3", world.now)->version, 2u);
  world.restart();
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  EXPECT_EQ(world.core->latest("qwen3", world.now).error().code(), ErrorCode::kUnavailable);
  ASSERT_TRUE(world.enroll(b));
  ASSERT_TRUE(world.announce(b, {CoreWorld::holding({"qwen3", 2})}));
  EXPECT_EQ(world.core->latest("qwen3", world.now)->version, 2u);
  world.pass(3s, {a, b});
  EXPECT_EQ(world.core->latest("absent", world.now).error().code(), ErrorCode::kNotFound);
}

TEST(CoordinatorCatalog, AVersionIsReadyWhenSomeoneHoldsEveryTensor) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.core->publish("a", a.incarnation, kV1, {1, 7}, {1, 8}, 1000, world.now));
  const auto state = [&] { return world.core->readiness().state_of(kV1); };
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
  EXPECT_EQ(world.core->fleet().catalog.find(kV1), nullptr);
}

TEST(CoordinatorCatalog, RetiredVersionsAreToldInHeartbeatsUntilTheyAreGone) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  world.holder("b", kV2);
  EXPECT_EQ(*world.core->retire(kV1, world.now), 1u);
  for (int i = 0; i < 2; ++i) {
    const auto told = world.beat_one(a);
    EXPECT_THAT(told->retiring, ElementsAre(kV1));
    EXPECT_THAT(told->retire, IsEmpty()) << "it does not say that nobody reads";
  }
  EXPECT_THAT(world.beat_with_readers(a, kV1, 0)->retire, ElementsAre(kV1));
  EXPECT_THAT(world.beat_with_readers(a, kV1, 0)->retire, ElementsAre(kV1));
  ASSERT_TRUE(world.core->announce("a", a.incarnation, 0, false, {}, {{kV1, {1, 9}}}, world.now));
  EXPECT_THAT(world.beat_with_readers(a, kV1, 0)->retire, IsEmpty());
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
  EXPECT_THAT(world.beat_one(b)->retiring, ElementsAre(kV2));
  const auto pull = world.open(world.node("p"), "qwen3", 2);
  ASSERT_FALSE(pull);
  EXPECT_EQ(pull.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(pull.error().message(), HasSubstr("retired"));
  ASSERT_TRUE(world.core->publish("b", b.incarnation, kV2, {1, 7}, {1, 8}, 1000, world.now));
  EXPECT_THAT(world.beat_one(b)->retiring, IsEmpty()) << "published again on purpose";
}

// Row 27: a partition between one node and the coordinator is no death while others read from it.
TEST(CoordinatorCore, Row27ASilentNodeThatPullersStillReadFromStaysSuspect) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo p = world.node("p");
  ASSERT_TRUE(world.enroll(p));
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  SourceReport read = report(a);
  for (int second = 1; second <= 10; ++second) {
    read.bytes = 100u * static_cast<unsigned>(second);
    ASSERT_TRUE(world.progress(p, *pull, {read}));
    world.pass(1s, {p});
    ASSERT_EQ(world.core->fleet().members.all().at("a").state, NodeState::kSuspect) << second;
  }
  EXPECT_FALSE(world.core->fleet().members.all().at("a").holdings.all().empty());
  // The same report again does not mean new bytes.
  ASSERT_TRUE(world.progress(p, *pull, {read}));
  world.pass(5s, {p});
  EXPECT_EQ(world.core->fleet().members.all().at("a").state, NodeState::kDead);
}

}  // namespace
}  // namespace rekindle::coordinator
