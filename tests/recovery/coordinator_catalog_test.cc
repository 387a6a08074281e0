// The version table: what `latest` means, which copies count, how changes become durable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/coordinator_fixture.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

Result<ModelVersion> latest(CoreWorld& world) { return world.core->latest("qwen3", world.now); }

TEST(CoordinatorLatest, B5DoesNotGoBackWhenTheOnlyHolderIsSilent) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  NodeInfo b = world.holder("b", kV2);
  ASSERT_EQ(*latest(world), kV2);
  world.pass(5s, {a});  // b is dead
  const auto silent = latest(world);
  ASSERT_FALSE(silent);
  EXPECT_EQ(silent.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(silent.error().message(), HasSubstr("qwen3@2 is the newest version"));
  const auto opened = world.open(world.node("p"), "qwen3");
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(world.open(world.node("p"), "qwen3", 1)->id, kV1) << "by its number it is there";

  // A new coordinator knows it, too.
  world.restart();
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  world.pass(5s, {a});
  EXPECT_EQ(latest(world).error().code(), ErrorCode::kUnavailable);

  b = world.holder("b", kV2);
  EXPECT_EQ(*latest(world), kV2);
}

TEST(CoordinatorLatest, B5GoesBackWhenTheOperatorRetiresTheNewestVersion) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  world.holder("b", kV2);
  world.pass(5s, {a});
  ASSERT_TRUE(world.core->retire(kV2, world.now));
  EXPECT_EQ(*latest(world), kV1);
}

TEST(CoordinatorLatest, AVersionThatWasNeverReadyIsNotLatest) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  ASSERT_TRUE(world.core->publish("", {}, kV2, {9, 7}, {9, 8}, 1000, world.now));
  EXPECT_EQ(*latest(world), kV1);
  world.disk_fails = true;
  const auto again = world.announce(a, {CoreWorld::holding(kV2, 9)});
  ASSERT_TRUE(again);
  ASSERT_THAT(*again, SizeIs(1));
  EXPECT_TRUE(again->front().again) << "that it is READY could not be made durable";
  EXPECT_EQ(*latest(world), kV1) << "a restart would take it back";
  world.disk_fails = false;
  EXPECT_THAT(*world.announce(a, {CoreWorld::holding(kV2, 9)}), IsEmpty());
  EXPECT_EQ(*latest(world), kV2);
}

Holding shard(std::uint32_t begin, std::uint32_t end, std::uint64_t layout) {
  Holding holding = CoreWorld::holding(kV1, 1, layout, true, /*whole=*/false);
  holding.covers = {{begin, end}};
  holding.checkpoint_tiles = 10;
  return holding;
}

TEST(CoordinatorLatest, B5ShardsOfManyNodesMakeAVersionReadyTogether) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  const NodeInfo b = world.node("b");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.enroll(b));
  ASSERT_TRUE(world.announce(a, {shard(0, 6, 1)}));
  ASSERT_TRUE(world.announce(b, {shard(7, 10, 2)}));
  EXPECT_EQ(world.core->readiness().state_of(kV1), VersionState::kStaging) << "tile 6 is nowhere";
  EXPECT_FALSE(latest(world));
  ASSERT_TRUE(world.announce(b, {shard(5, 10, 3)}));
  EXPECT_EQ(world.core->readiness().state_of(kV1), VersionState::kReady);
  EXPECT_EQ(*latest(world), kV1);
  Holding unverified = shard(5, 10, 3);
  unverified.verified = false;
  ASSERT_TRUE(world.announce(b, {unverified}, /*full=*/true));
  EXPECT_EQ(latest(world).error().code(), ErrorCode::kUnavailable);
  // The tiles of a copy that is being filled count.
  Holding filling = CoreWorld::holding(kV1, 1, 4, false);
  filling.held = {{4, 8}, {8, 10}};
  ASSERT_TRUE(world.announce(b, {filling}, /*full=*/true));
  EXPECT_EQ(*latest(world), kV1);
}

Holding unverified(const ModelVersion& id) {
  Holding holding = CoreWorld::holding(id);
  holding.verified = false;
  return holding;
}

TEST(CoordinatorVerified, B6AnUnverifiedCopyIsNoSourceAndMakesNothingReady) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.core->publish("", {}, kV1, {1, 7}, {1, 8}, 1000, world.now));
  ASSERT_TRUE(world.announce(a, {unverified(kV1)}));
  EXPECT_FALSE(latest(world));
  EXPECT_FALSE(world.open(world.node("p"), "qwen3", 1));
  EXPECT_EQ(world.core->readiness().whole_copies(kV1), 0u);
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  EXPECT_THAT(world.sources("p"), ElementsAre("a"));
}

TEST(CoordinatorVerified, B6WhoAsksForAVersionThatIsBeingVerifiedIsToldToRetry) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  world.pass(5s, {a});
  ASSERT_TRUE(world.announce(a, {unverified(kV1)}));
  const NodeInfo p = world.node("p");
  const auto unknown = world.open(p, "qwen3", 1);
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code(), ErrorCode::kUnavailable) << "the table does not know it yet";
  ASSERT_TRUE(world.core->publish("", {}, kV1, test::numbered_digest(1, 7),
                                  test::numbered_digest(1, 8), 1000, world.now));
  const auto known = world.open(p, "qwen3", 1);
  ASSERT_FALSE(known);
  EXPECT_EQ(known.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(known.error().message(), HasSubstr("has yet to verify it: a"));
  EXPECT_EQ(world.open(a, "qwen3", 1).error().code(), ErrorCode::kNotFound)
      << "it does not wait for itself";
  ASSERT_TRUE(world.announce(a, {}, /*full=*/true));
  EXPECT_EQ(world.open(p, "qwen3", 1).error().code(), ErrorCode::kNotFound);
}

TEST(CoordinatorVerified, WhoWaitsForAVerificationLearnsForWhom) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  const NodeInfo p = world.node("p");
  ASSERT_TRUE(world.enroll(a));
  world.pass(5s, {a});
  ASSERT_TRUE(world.announce(a, {unverified(kV1)}));
  const auto names = [&](const NodeInfo& puller, std::optional<std::uint64_t> version) {
    return world.core->resolver().yet_to_verify({puller, "qwen3", version, ""});
  };
  EXPECT_THAT(names(p, 1), ElementsAre("a"));
  EXPECT_THAT(names(p, std::nullopt), ElementsAre("a"));
  EXPECT_THAT(names(p, 2), ElementsAre());
  EXPECT_THAT(names(a, 1), ElementsAre()) << "not for itself";
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  EXPECT_THAT(names(p, 1), ElementsAre());
}

TEST(CoordinatorPulls, TheOnlyHolderNeedsNoSource) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  const auto opened = world.open(a, "qwen3", 1);
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->id, kV1);
  EXPECT_TRUE(opened->sources.empty());
  EXPECT_EQ(opened->retry_after, Duration::zero());
}

TEST(CoordinatorVerified, B6AnUnverifiedCopyVouchesForNoVersion) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {unverified(kV1)}));
  EXPECT_EQ(world.core->fleet().catalog.find(kV1), nullptr);
}

TEST(CoordinatorVerified, B6NobodyLetsGoOfAGoodCopyForAnUnverifiedOne) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.node("b");
  ASSERT_TRUE(world.enroll(b));
  ASSERT_TRUE(world.announce(b, {unverified(kV1)}));
  EXPECT_EQ(world.core->let_go("a", a.incarnation, kV1, world.now).error().code(),
            ErrorCode::kDenied);
  ASSERT_TRUE(world.announce(b, {CoreWorld::holding(kV1)}));
  EXPECT_TRUE(world.core->let_go("a", a.incarnation, kV1, world.now));
}

TEST(CoordinatorVerified, B6AnUnverifiedCopyIsNoReplica) {
  CoreWorld world({.replicas = 2});
  const NodeInfo a = world.holder("a", kV1);
  const NodeInfo b = world.node("b");
  ASSERT_TRUE(world.enroll(b));
  ASSERT_TRUE(world.announce(b, {unverified(kV1)}));
  world.pass(15s, {a, b});
  EXPECT_TRUE(world.core->replicas().shortages().contains(kV1));
  ASSERT_TRUE(world.announce(b, {CoreWorld::holding(kV1)}));
  world.pass(1s, {a, b});
  EXPECT_FALSE(world.core->replicas().shortages().contains(kV1));
}

TEST(CoordinatorRetire, B3ReadersHaveADeadlineAndForceGivesThemNone) {
  CoreWorld world;
  const NodeInfo a = world.holder("a", kV1);
  ASSERT_TRUE(world.core->retire(kV1, world.now, 5s));
  const auto early = world.beat_with_readers(a, kV1, 1);
  EXPECT_THAT(early->retiring, ElementsAre(kV1));
  EXPECT_THAT(early->retire, IsEmpty());
  world.pass(5s, {a});
  EXPECT_THAT(world.beat_with_readers(a, kV1, 1)->retire, ElementsAre(kV1));

  world.holder("b", kV2);
  const NodeInfo c = world.holder("c", kV2);
  ASSERT_TRUE(world.core->retire(kV2, world.now));
  EXPECT_THAT(world.beat_with_readers(c, kV2, 1)->retire, IsEmpty());
  ASSERT_TRUE(world.core->retire(kV2, world.now, 0s)) << "--force, later";
  EXPECT_THAT(world.beat_with_readers(c, kV2, 1)->retire, ElementsAre(kV2));
}

TEST(CoordinatorRetire, B3WithoutADeadlineTenMinutesAndANewCoordinatorCountsThemAnew) {
  CoreWorld world;
  NodeInfo a = world.holder("a", kV1);
  ASSERT_TRUE(world.core->retire(kV1, world.now));
  world.pass(590s, {a});
  EXPECT_THAT(world.beat_with_readers(a, kV1, 1)->retire, IsEmpty());
  world.restart();
  a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {CoreWorld::holding(kV1)}));
  world.pass(590s, {a});
  EXPECT_THAT(world.beat_with_readers(a, kV1, 1)->retire, IsEmpty());
  world.pass(11s, {a});
  EXPECT_THAT(world.beat_with_readers(a, kV1, 1)->retire, ElementsAre(kV1));
}

TEST(CoordinatorTombstones, C2TheOldestAreDroppedBelowAWatermarkAndStayRetired) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  for (std::uint64_t version = 1; version <= 1000; ++version) {
    const ModelVersion id{"qwen3", version};
    ASSERT_TRUE(world.core->publish("", {}, id, test::numbered_digest(version, 7), {1, 8}, 1000,
                                    world.now));
    ASSERT_TRUE(world.core->retire(id, world.now));
  }
  const Catalog& catalog = world.core->fleet().catalog;
  EXPECT_LE(catalog.all().size(), 256u);
  EXPECT_EQ(world.core->fleet().table.state(), world.disk);
  EXPECT_TRUE(catalog.is_retired({"qwen3", 1}));
  EXPECT_FALSE(catalog.is_retired({"qwen3", 1001}));
  EXPECT_FALSE(catalog.is_retired({"another", 1}));

  // The holder of a late copy is told to let go, and the version stays retired.
  EXPECT_THAT(*world.announce(a, {CoreWorld::holding({"qwen3", 3}, 3)}), IsEmpty());
  EXPECT_THAT(world.beat_with_readers(a, {"qwen3", 3}, 0)->retire,
              ElementsAre(ModelVersion{"qwen3", 3}));
  EXPECT_FALSE(world.open(world.node("p"), "qwen3", 3));
  EXPECT_FALSE(latest(world));
  EXPECT_TRUE(world.core->let_go("a", a.incarnation, {"qwen3", 3}, world.now));
  EXPECT_EQ(
      world.core->publish("", {}, {"qwen3", 3}, {3, 7}, {1, 8}, 1000, world.now).error().code(),
      ErrorCode::kDenied);
  EXPECT_TRUE(world.core->retire({"qwen3", 3}, world.now)) << "it is";
  EXPECT_TRUE(world.core->publish("", {}, {"qwen3", 1000}, test::numbered_digest(1000, 7), {1, 8},
                                  1000, world.now));
}

TEST(CoordinatorTombstones, C2RepairLooksAtNoneOfThem) {
  CoreWorld world({.replicas = 1});
  const NodeInfo a = world.holder("a", {"qwen3", 300});
  for (std::uint64_t version = 1; version <= 200; ++version) {
    ASSERT_TRUE(world.core->publish("", {}, {"qwen3", version}, test::numbered_digest(version, 7),
                                    {1, 8}, 1000, world.now));
    ASSERT_TRUE(world.core->retire({"qwen3", version}, world.now));
  }
  EXPECT_THAT(world.core->fleet().catalog.live(), ElementsAre(ModelVersion{"qwen3", 300}));
}

// A core whose batches the test writes itself.
class GroupCommit : public ::testing::Test {
 protected:
  GroupCommit() {
    (void)core_.start(now_);
    EXPECT_NE(end(true), 0u);
    NodeInfo node;
    node.node_id = "a";
    node.incarnation = Incarnation::random();
    node.control_endpoint = "a:7400";
    a_ = node;
    EXPECT_TRUE(core_.enroll(a_, "", 0, "connection", now_).answer);
  }
  // Ends the next batch, or the one that is under way.
  CommitNumber end(bool durable) {
    const auto batch = taken_ ? std::exchange(taken_, {}) : core_.take_batch();
    if (!batch) return 0;
    if (durable) ++batches_;
    return core_.committed(batch->number, durable, now_);
  }
  void begin() { taken_ = core_.take_batch(); }
  Durably<std::uint64_t> publish(const ModelVersion& id, std::uint64_t root = 1) {
    const Publication publication{id, test::numbered_digest(root, 7),
                                  test::numbered_digest(root, 8), 1000};
    return core_.publish("", {}, publication, now_);
  }
  Announced announce(std::vector<Holding> add) {
    return core_.announce("a", a_.incarnation, 0, /*full=*/true, std::move(add), {}, now_);
  }

  TimePoint now_{1h};
  Core core_{{}, {}, {}, [] { return PullId::random(); }};
  std::optional<CommitBatch> taken_;
  NodeInfo a_;
  int batches_ = 0;
};

TEST_F(GroupCommit, APublisherMayHaveSoManyVersionsThatItNeverCompletes) {
  const std::size_t most = Limits{}.max_open_claims;
  const auto claim = [&](std::uint64_t version, const std::string& claimant) {
    Publication publication{{"qwen3", version},
                            test::numbered_digest(version, 7),
                            test::numbered_digest(version, 8),
                            1000};
    publication.claimant = claimant;
    return core_.publish("", {}, publication, now_);
  };
  std::size_t taken = 0;
  Result<std::uint64_t> last = 0;
  for (std::uint64_t version = 1; version <= 3000; ++version) {
    last = claim(version, "10.0.0.9").answer;
    if (last) ++taken;
  }
  EXPECT_EQ(taken, most);
  ASSERT_FALSE(last);
  EXPECT_EQ(last.error().code(), ErrorCode::kExhausted);
  EXPECT_NE(last.error().message().find("--max-open-claims"), std::string::npos);
  EXPECT_TRUE(claim(1, "10.0.0.9").answer) << "the same claim again is no new one";
  EXPECT_TRUE(claim(4000, "10.0.0.1").answer) << "others may publish";
  end(true);
  // One that retires its claims may publish again.
  EXPECT_TRUE(core_.retire({"qwen3", 1}, now_).answer);
  end(true);
  EXPECT_TRUE(claim(5000, "10.0.0.9").answer);
}

TEST_F(GroupCommit, AClaimThatNobodyFillsIsForgottenAndMayComeBack) {
  EXPECT_TRUE(publish({"qwen3", 1}).answer);
  end(true);
  ASSERT_NE(core_.fleet().catalog.find({"qwen3", 1}), nullptr);
  const TimePoint until = now_ + 26h;
  while (now_ < until) {
    now_ += 400ms;
    core_.tick(now_);
    if (core_.fleet().catalog.find({"qwen3", 1}) == nullptr) break;
    end(true);
    // Time passes in steps: a larger one would be a pause of the coordinator.
  }
  EXPECT_EQ(core_.fleet().catalog.find({"qwen3", 1}), nullptr);
  EXPECT_TRUE(publish({"qwen3", 1}).answer);
  end(true);
  EXPECT_NE(core_.fleet().catalog.find({"qwen3", 1}), nullptr);
}

TEST_F(GroupCommit, WhatOneNodeAnnouncesTakesBoundedMemory) {
  std::size_t kept = 0;
  Result<std::vector<AnnounceConflict>> last = std::vector<AnnounceConflict>();
  for (std::uint64_t i = 1; i <= 200; ++i) {
    Holding holding;
    holding.id = {"qwen3", i};
    holding.root = test::numbered_digest(i, 7);
    holding.layout = test::numbered_digest(i, 9);
    for (std::uint32_t tile = 0; tile < 100'000; ++tile) {
      holding.held.emplace_back(2 * tile, 2 * tile + 1);
    }
    last = core_.announce("a", a_.incarnation, 0, /*full=*/false, {holding}, {}, now_).answer;
    if (last) ++kept;
  }
  ASSERT_FALSE(last);
  EXPECT_EQ(last.error().code(), ErrorCode::kExhausted);
  EXPECT_GT(kept, 10u);
  EXPECT_LT(kept * 800'000, Limits{}.max_holding_bytes_per_member);
}

TEST_F(GroupCommit, C4AnAnnouncementOfManyUnknownVersionsIsOneBatch) {
  std::vector<Holding> many;
  for (std::uint64_t version = 1; version <= 500; ++version) {
    many.push_back(CoreWorld::holding({"qwen3", version}, version));
  }
  Announced announced = announce(many);
  ASSERT_TRUE(announced.answer);
  const int before = batches_;
  EXPECT_GE(end(true), announced.commit);
  EXPECT_EQ(end(true), 0u) << "nothing is left to write";
  EXPECT_EQ(batches_, before + 1);
  EXPECT_THAT(core_.finish(std::move(announced), {}), IsEmpty());
  EXPECT_EQ(core_.latest("qwen3", now_)->version, 500u);
}

TEST_F(GroupCommit, C4WhatComesWhileABatchIsWrittenGathersInTheNext) {
  const auto first = publish({"qwen3", 1});
  begin();
  EXPECT_FALSE(core_.take_batch()) << "one at a time";
  const auto second = publish({"qwen3", 2});
  const auto third = publish({"qwen3", 3});
  EXPECT_EQ(core_.fleet().catalog.find({"qwen3", 1}), nullptr) << "not durable yet";
  EXPECT_EQ(publish({"qwen3", 1}).commit, first.commit)
      << "the same claim waits for the same batch";
  EXPECT_EQ(end(true), first.commit);
  EXPECT_NE(core_.fleet().catalog.find({"qwen3", 1}), nullptr);
  EXPECT_EQ(core_.fleet().catalog.find({"qwen3", 2}), nullptr);
  EXPECT_EQ(second.commit, third.commit);
  EXPECT_EQ(end(true), second.commit);
  EXPECT_NE(core_.fleet().catalog.find({"qwen3", 3}), nullptr);
}

TEST_F(GroupCommit, C4OfTwoClaimsUnderWayTheLaterIsRefusedWhenTheFirstIsDurable) {
  const auto first = publish(kV1, 1);
  const auto other = publish(kV1, 2);
  ASSERT_TRUE(first.answer);
  ASSERT_FALSE(other.answer);
  EXPECT_EQ(other.answer.error().code(), ErrorCode::kDenied);
  EXPECT_EQ(other.commit, first.commit);
  Announced announced = announce({CoreWorld::holding(kV1, 2)});
  EXPECT_EQ(announced.commit, first.commit);
  (void)end(true);
  const auto conflicts = core_.finish(std::move(announced), {});
  ASSERT_THAT(conflicts, SizeIs(1));
  EXPECT_FALSE(conflicts.front().again);
  EXPECT_THAT(core_.fleet().members.all().at("a").holdings.all(), IsEmpty());
}

TEST_F(GroupCommit, C4WithAFailedBatchWhatGatheredBehindItFailsAndTheDiskIsPutRight) {
  ASSERT_TRUE(publish(kV2).answer);
  (void)end(true);
  const auto first = publish(kV1);
  begin();
  const auto second = core_.retire(kV1, now_);
  EXPECT_GT(second.commit, first.commit);
  EXPECT_EQ(end(false), second.commit) << "it was judged by what has not come to be";
  EXPECT_EQ(core_.fleet().catalog.find(kV1), nullptr);
  EXPECT_FALSE(core_.take_batch()) << "nothing wants to be durable";
  // The next batch erases any trace of the failed one.
  (void)core_.retire(kV2, now_);
  begin();
  ASSERT_TRUE(taken_);
  ASSERT_TRUE(taken_->change.versions.contains(kV1));
  EXPECT_FALSE(taken_->change.versions.at(kV1));
  (void)end(true);
  EXPECT_TRUE(core_.fleet().catalog.is_retired(kV2));
}

TEST_F(GroupCommit, B5AMarkThatFailedWithItsBatchIsMadeAgain) {
  ASSERT_TRUE(publish(kV1).answer);
  (void)end(true);
  const auto half = [](std::uint32_t begin, std::uint32_t end, std::uint64_t layout) {
    Holding holding = CoreWorld::holding(kV1, 1, layout, true, /*whole=*/false);
    holding.covers = {{begin, end}};
    holding.checkpoint_tiles = 10;
    return holding;
  };
  ASSERT_TRUE(announce({half(0, 5, 1), half(5, 10, 2)}).answer);
  (void)end(false);
  EXPECT_FALSE(core_.fleet().catalog.find(kV1)->ready);
  EXPECT_FALSE(core_.latest("qwen3", now_));
  // No agent reports anything new; the grace ends.
  for (int i = 0; i < 50; ++i) {
    now_ += 100ms;
    ASSERT_TRUE(core_.heartbeat("a", a_.incarnation, {}, now_));
  }
  EXPECT_GT(end(true), 0u);
  EXPECT_TRUE(core_.fleet().catalog.find(kV1)->ready);
  EXPECT_EQ(*core_.latest("qwen3", now_), kV1);
  now_ += 2s;
  EXPECT_EQ(end(true), 0u) << "once is enough";
}

TEST_F(GroupCommit, AHoldingCountsWhenItsClaimIsDurableAndNotWhenANewerWordCameMeanwhile) {
  Announced announced = announce({CoreWorld::holding(kV1)});
  EXPECT_THAT(core_.fleet().members.all().at("a").holdings.all(), IsEmpty());
  ASSERT_TRUE(announce({}).answer) << "it holds nothing any more";
  (void)end(true);
  EXPECT_THAT(core_.fleet().members.all().at("a").holdings.all(), IsEmpty());
  EXPECT_NE(core_.fleet().catalog.find(kV1), nullptr);
}

}  // namespace
}  // namespace rekindle::coordinator
