// Versions of which no node has all: each layout of a joint publication lies on other nodes.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/coordinator/state_records.h"
#include "tests/recovery/coordinator_fixture.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

// Layouts that cut every tile: no node lists a tile that it has as a whole.
Digest part(std::uint64_t number) { return CoreWorld::holding(kV1, 1, 100 + number).layout; }
Holding part_of(const ModelVersion& id, std::uint64_t number, bool verified = true) {
  Holding holding = CoreWorld::holding(id, 1, 100 + number, true, /*whole=*/false);
  holding.checkpoint_tiles = 10;
  holding.verified = verified;
  return holding;
}

struct JointWorld : CoreWorld {
  explicit JointWorld(std::uint64_t parts, Limits its_limits = {}) : CoreWorld(its_limits) {
    EXPECT_TRUE(claim(parts));
  }
  // Claims version 1 with parts 1 to `parts`.
  Result<std::uint64_t> claim(std::uint64_t parts, std::uint64_t first = 1,
                              const ModelVersion& id = kV1) {
    std::vector<Digest> layouts;
    for (std::uint64_t i = 0; i < parts; ++i) layouts.push_back(part(first + i));
    const Holding any = part_of(id, 1);
    return core->publish("", {}, id, any.root, any.tensor_set, any.checkpoint_bytes, now, {},
                         layouts);
  }
  NodeInfo holder_of(const std::string& name, std::uint64_t number, bool verified = true) {
    const NodeInfo info = node(name);
    EXPECT_TRUE(enroll(info));
    EXPECT_TRUE(announce(info, {part_of(kV1, number, verified)}));
    return info;
  }
  // Nodes h1, h2, … with one part each.
  std::vector<NodeInfo> holders(std::uint64_t parts) {
    std::vector<NodeInfo> all;
    for (std::uint64_t i = 1; i <= parts; ++i) all.push_back(holder_of(fmt::format("h{}", i), i));
    return all;
  }
  bool ready() const { return core->readiness().state_of(kV1) == VersionState::kReady; }
  Result<ModelVersion> latest() { return core->latest("qwen3", now); }
  static std::set<Digest> layouts(const std::vector<SourceOffer>& offers) {
    std::set<Digest> result;
    for (const SourceOffer& offer : offers) result.insert(offer.layout);
    return result;
  }
};

TEST(JointVersions, OneIsReadyOnceTheLastPartIsVerified) {
  JointWorld world(3);
  EXPECT_FALSE(world.ready()) << "nobody holds any of it";
  world.holder_of("a", 1);
  world.holder_of("b", 2);
  EXPECT_FALSE(world.ready());
  const NodeInfo c = world.holder_of("c", 3, /*verified=*/false);
  EXPECT_FALSE(world.ready());
  EXPECT_FALSE(world.latest());
  Holding incomplete = part_of(kV1, 3);
  incomplete.complete = false;
  incomplete.held = {{0, 9}};
  ASSERT_TRUE(world.announce(c, {incomplete}));
  EXPECT_FALSE(world.ready());
  ASSERT_TRUE(world.announce(c, {part_of(kV1, 3)}));
  EXPECT_TRUE(world.ready());
  EXPECT_EQ(*world.latest(), kV1);
  EXPECT_EQ(world.core->readiness().whole_copies(kV1), 0u);
}

TEST(JointVersions, APartWithAnotherRootIsNone) {
  JointWorld world(2);
  world.holder_of("a", 1);
  const NodeInfo b = world.node("b");
  ASSERT_TRUE(world.enroll(b));
  Holding other = part_of(kV1, 2);
  other.root = test::numbered_digest(2, 7);
  const auto conflicts = world.announce(b, {other});
  ASSERT_TRUE(conflicts);
  EXPECT_THAT(*conflicts, SizeIs(1));
  EXPECT_FALSE(world.ready());
}

TEST(JointVersions, OneWhosePartsAreAnnouncedBeforeTheClaimIsReadyWithTheClaim) {
  JointWorld world(0);
  world.holders(2);
  EXPECT_FALSE(world.latest()) << "nobody has said what the parts are";
  ASSERT_TRUE(world.claim(2));
  EXPECT_EQ(*world.latest(), kV1);
  EXPECT_TRUE(world.disk.versions.at(kV1).ready) << "durably";
}

// The coordinator has lost its state, and nobody claims the version again.
TEST(JointVersions, AHolderThatKnowsThePartsMakesALostOneReadyAgain) {
  for (const bool first_of_all : {true, false}) {
    CoreWorld world;
    std::vector<Digest> parts{part(1), part(2), part(3)};
    std::ranges::sort(parts);
    std::vector<NodeInfo> nodes;
    for (std::uint64_t number = 1; number <= 3; ++number) {
      nodes.push_back(world.node(fmt::format("h{}", number)));
      ASSERT_TRUE(world.enroll(nodes.back()));
    }
    const auto announce = [&](std::uint64_t number, bool knows) {
      Holding holding = part_of(kV1, number);
      if (knows) holding.part_layouts = parts;
      const auto conflicts = world.announce(nodes[number - 1], {holding});
      ASSERT_TRUE(conflicts);
      EXPECT_THAT(*conflicts, IsEmpty());
    };
    if (first_of_all) announce(1, true);
    announce(2, false);
    announce(3, false);
    if (!first_of_all) {
      EXPECT_TRUE(world.disk.versions.at(kV1).parts.empty());
      announce(1, true);
    }
    world.pass(2s, nodes);
    EXPECT_EQ(world.core->readiness().state_of(kV1), VersionState::kReady);
    EXPECT_EQ(world.disk.versions.at(kV1).parts, parts);
    EXPECT_TRUE(world.disk.versions.at(kV1).ready) << "durably";
    EXPECT_EQ(*world.core->latest("qwen3", world.now), kV1);
  }
}

TEST(JointVersions, PartsThatAreKnownAreNotReplacedByAnAnnouncement) {
  JointWorld world(2);
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  Holding holding = part_of(kV1, 1);
  holding.part_layouts = {holding.layout};
  ASSERT_TRUE(world.announce(a, {holding}));
  EXPECT_FALSE(world.ready()) << "part 2 is missing";
  EXPECT_THAT(world.disk.versions.at(kV1).parts, SizeIs(2));
}

TEST(JointVersions, AnUnverifiedCopyDoesNotTellTheParts) {
  CoreWorld world;
  const NodeInfo a = world.node("a");
  ASSERT_TRUE(world.enroll(a));
  Holding holding = part_of(kV1, 1, /*verified=*/false);
  holding.part_layouts = {holding.layout};
  ASSERT_TRUE(world.announce(a, {holding}));
  EXPECT_EQ(world.core->readiness().state_of(kV1), VersionState::kStaging);
  EXPECT_FALSE(world.disk.versions.contains(kV1));
}

TEST(JointVersions, AWholeCopyOrTilesMakeOneReadyAsAlways) {
  JointWorld world(2);
  const NodeInfo w = world.holder("w", kV1);
  EXPECT_TRUE(world.ready());
  Holding shard = CoreWorld::holding(kV1, 1, 7, true, /*whole=*/false);
  shard.checkpoint_tiles = 10;
  shard.covers = {{0, 10}};
  ASSERT_TRUE(world.announce(w, {shard}, /*full=*/true));
  EXPECT_TRUE(world.ready());
  ASSERT_TRUE(world.announce(w, {part_of(kV1, 1)}, /*full=*/true));
  EXPECT_FALSE(world.ready());
}

TEST(JointVersions, TwoHoldersOfTheSameLayoutAreOnePart) {
  JointWorld world(0);
  // Two of three agents have the same layout, and the claim names it twice.
  const Holding any = part_of(kV1, 1);
  ASSERT_TRUE(world.core->publish("", {}, kV1, any.root, any.tensor_set, any.checkpoint_bytes,
                                  world.now, {}, {part(2), part(1), part(2)}));
  EXPECT_THAT(world.disk.versions.at(kV1).parts, SizeIs(2));
  const NodeInfo a = world.holder_of("a", 1);
  const NodeInfo b = world.holder_of("b", 1);
  EXPECT_FALSE(world.ready()) << "two holders of one part are not two parts";
  const NodeInfo c = world.holder_of("c", 2);
  EXPECT_TRUE(world.ready());
  world.pass(3s, {b, c});  // a is dead
  EXPECT_TRUE(world.ready()) << "b has the same part";
  EXPECT_EQ(*world.latest(), kV1);
}

TEST(JointVersions, OneThatLosesAPartStaysLatestAndIsUnavailableUntilThePartIsBack) {
  JointWorld world(2);
  const NodeInfo old = world.node("old");
  ASSERT_TRUE(world.enroll(old));
  ASSERT_TRUE(world.announce(old, {CoreWorld::holding({"qwen3", 0}, 5)}));
  const NodeInfo a = world.holder_of("a", 1);
  const NodeInfo b = world.holder_of("b", 2);
  ASSERT_EQ(*world.latest(), kV1);
  world.pass(3s, {a, old});
  EXPECT_FALSE(world.ready());
  EXPECT_EQ(world.latest().error().code(), ErrorCode::kUnavailable) << "not the older version";
  const NodeInfo again = world.holder_of("b", 2, /*verified=*/false);
  EXPECT_EQ(world.latest().error().code(), ErrorCode::kUnavailable);
  ASSERT_TRUE(world.announce(again, {part_of(kV1, 2)}));
  EXPECT_EQ(*world.latest(), kV1);
}

TEST(JointVersions, OneWhosePublishersDieBeforeTheLastPartIsNeverReady) {
  JointWorld world(2);
  const NodeInfo a = world.holder_of("a", 1);
  world.pass(3s);
  world.holder_of("b", 2);
  EXPECT_FALSE(world.ready()) << "a died before b had its part";
  EXPECT_FALSE(world.latest());
  EXPECT_FALSE(world.disk.versions.at(kV1).ready);
  world.holder_of("c", 1);
  EXPECT_TRUE(world.ready());
}

TEST(JointVersions, ThePartsOutliveTheCoordinator) {
  JointWorld world(2);
  const NodeInfo a = world.holder_of("a", 1);
  world.restart();
  ASSERT_TRUE(world.enroll(a));
  ASSERT_TRUE(world.announce(a, {part_of(kV1, 1)}));
  EXPECT_FALSE(world.ready());
  world.holder_of("b", 2);
  EXPECT_EQ(*world.latest(), kV1);
}

TEST(JointVersions, AClaimWithoutPartsKeepsThemAndOneWithOthersReplacesThem) {
  JointWorld world(2);
  const auto parts = [&] { return world.disk.versions.at(kV1).parts; };
  ASSERT_TRUE(world.claim(0));
  EXPECT_THAT(parts(), UnorderedElementsAre(part(1), part(2)));
  world.holder("w", kV1);  // its announcement claims the version, too
  EXPECT_THAT(parts(), SizeIs(2));
  ASSERT_TRUE(world.claim(3, /*first=*/5));
  EXPECT_THAT(parts(), UnorderedElementsAre(part(5), part(6), part(7)));
  const int writes = world.writes;
  ASSERT_TRUE(world.claim(3, /*first=*/5));
  EXPECT_EQ(world.writes, writes) << "the same claim again is durable already";
  const Holding other = CoreWorld::holding(kV1, 2);
  EXPECT_EQ(
      world.core->publish("", {}, kV1, other.root, other.tensor_set, 1000, world.now, {}, {part(9)})
          .error()
          .code(),
      ErrorCode::kDenied);
  EXPECT_THAT(parts(), UnorderedElementsAre(part(5), part(6), part(7)));
}

TEST(JointVersions, OneThatWasRetiredComesBackWithItsParts) {
  JointWorld world(2);
  world.holders(2);
  ASSERT_TRUE(world.core->retire(kV1, world.now));
  EXPECT_FALSE(world.latest());
  ASSERT_TRUE(world.claim(0));
  EXPECT_EQ(*world.latest(), kV1) << "its holders have not let go yet";
}

// An agent died between the claim and its commit. An operator ends what nobody will complete.
TEST(JointVersions, OneThatWasNeverReadyIsRetiredAndItsNumberStaysTaken) {
  JointWorld world(2);
  const NodeInfo a = world.holder_of("a", 1);
  EXPECT_FALSE(world.ready());
  ASSERT_TRUE(world.core->retire(kV1, world.now));
  const auto beat = world.beat_with_readers(a, kV1, 0);
  ASSERT_TRUE(beat);
  EXPECT_THAT(beat->retire, ElementsAre(kV1)) << "its holder lets go";
  const Digest other = test::numbered_digest(9, 9);
  const auto refused =
      world.core->publish("", {}, kV1, other, part_of(kV1, 1).tensor_set, 1000, world.now, {}, {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(refused.error().message(), HasSubstr("publish under a new version"));
  ASSERT_TRUE(world.claim(2)) << "the same bytes may complete it";
}

TEST(JointVersions, ThePartsAreRecorded) {
  StateChange change;
  DurableVersion version;
  version.root = part(9);
  version.parts = {part(1), part(2)};
  change.versions[kV1] = version;
  Records records;
  apply_writes(StateRecords::parse({})->encode(change), records);
  const auto parsed = StateRecords::parse(records);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->state().versions.at(kV1), version);
  // Other parts replace them.
  change.versions[kV1]->parts = {part(3)};
  apply_writes(parsed->encode(change), records);
  EXPECT_THAT(StateRecords::parse(records)->state().versions.at(kV1).parts, ElementsAre(part(3)));
}

// The sources of pulls.

TEST(JointPulls, APullGetsEveryPartAlsoOfMoreThan16Nodes) {
  for (const std::uint64_t parts : {2u, 16u, 17u, 32u, 64u, 80u}) {
    JointWorld world(parts);
    world.holders(parts);
    const auto pull = world.open(world.node("p"), "qwen3");
    ASSERT_TRUE(pull) << pull.error().message();
    EXPECT_THAT(pull->sources, SizeIs(parts));
    EXPECT_THAT(JointWorld::layouts(pull->sources), SizeIs(parts));
  }
}

TEST(JointPulls, APullGetsOneHolderOfEachPartBeforeASecondOfAny) {
  JointWorld world(12);
  const auto first = world.holders(12);
  for (std::uint64_t i = 1; i <= 12; ++i) world.holder_of(fmt::format("z{}", i), i);
  for (int i = 0; i < 10; ++i) {
    const auto pull = world.open(world.node(fmt::format("p{}", i)), "qwen3");
    ASSERT_TRUE(pull);
    EXPECT_EQ(JointWorld::layouts({pull->sources.begin(), pull->sources.begin() + 12}).size(), 12u);
  }
}

TEST(JointPulls, APullKeepsAllPartsWithItsProgress) {
  JointWorld world(20);
  const auto holders = world.holders(20);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  std::vector<SourceReport> reports;
  for (const NodeInfo& holder : holders) reports.push_back(report(holder));
  const auto answer = world.progress(p, *pull, reports, 10);
  ASSERT_TRUE(answer);
  EXPECT_THAT(JointWorld::layouts(answer->sources), SizeIs(20));
}

TEST(JointPulls, AfterARestartThePullHasItsSharesAgain) {
  JointWorld world(20);
  const auto holders = world.holders(20);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_TRUE(pull);
  world.restart();
  std::vector<SourceReport> reports;
  for (std::uint64_t i = 0; i < holders.size(); ++i) {
    ASSERT_TRUE(world.enroll(holders[i]));
    ASSERT_TRUE(world.announce(holders[i], {part_of(kV1, i + 1)}));
    reports.push_back(report(holders[i]));
  }
  const auto answer = world.progress(p, *pull, reports);
  ASSERT_TRUE(answer);
  EXPECT_THAT(JointWorld::layouts(answer->sources), SizeIs(20));
  for (const NodeInfo& holder : holders) {
    EXPECT_EQ(world.core->pulls().table().pullers_of(holder.incarnation), 1u);
  }
}

TEST(JointPulls, NodesThatFillUpAreOfferedBesideTheParts) {
  JointWorld world(20);
  world.holders(20);
  for (int i = 0; i < 50; ++i) world.filling(fmt::format("f{}", i));
  const auto pull = world.open(world.node("p"), "qwen3");
  ASSERT_TRUE(pull);
  EXPECT_THAT(pull->sources, SizeIs(36)) << "20 parts and 16 others";
  std::vector<std::string> first = CoreWorld::names(pull->sources);
  first.resize(20);
  for (const std::string& name : first) EXPECT_EQ(name[0], 'h');
}

TEST(JointPulls, WithAWholeCopyThePartsAreSourcesLikeOthers) {
  JointWorld world(20);
  world.holders(20);
  world.holder("w", kV1);
  const auto pull = world.open(world.node("p"), "qwen3");
  ASSERT_TRUE(pull);
  EXPECT_THAT(pull->sources, SizeIs(16));
}

TEST(JointPulls, AHolderServesMorePullersThanOneOfAWholeCopyBecauseEachTakesAFraction) {
  JointWorld world(3, {.max_pullers_per_source = 2});
  world.holders(3);
  for (int i = 0; i < 6; ++i) {
    EXPECT_THAT(world.open(world.node(fmt::format("p{}", i)), "qwen3")->sources, SizeIs(3));
  }
  const auto waits = world.open(world.node("q"), "qwen3");
  ASSERT_TRUE(waits);
  EXPECT_THAT(waits->sources, IsEmpty());
  EXPECT_GT(waits->retry_after, 0ms);
}

// Two pulls that had some parts each would wait for each other.
TEST(JointPulls, APullGetsAllPartsOrNone) {
  JointWorld world(2, {.max_pullers_per_source = 1});
  const auto holders = world.holders(2);
  // Another version keeps the first holder busy.
  ASSERT_TRUE(world.announce(holders[0], {CoreWorld::holding({"other", 1}, 4)}));
  const auto other = world.open(world.node("o"), "other");
  const auto other2 = world.open(world.node("o2"), "other");
  ASSERT_TRUE(other && other2);
  const auto first = world.open(world.node("p"), "qwen3");
  EXPECT_THAT(first->sources, SizeIs(2)) << "the holder of a part serves two";
  const NodeInfo q = world.node("q");
  const auto second = world.open(q, "qwen3");
  ASSERT_TRUE(second);
  EXPECT_THAT(second->sources, IsEmpty()) << "only the second part has a free share";
  world.filling("f");
  const auto filled = world.open(q, "qwen3");
  EXPECT_THAT(CoreWorld::names(filled->sources), ElementsAre("f"));
  world.close(first->pull_id);
  world.close(other->pull_id);
  const auto answer = world.progress(q, *filled);
  ASSERT_TRUE(answer);
  EXPECT_THAT(CoreWorld::names(answer->sources), UnorderedElementsAre("h1", "h2", "f"));
}

TEST(JointPulls, APullThatLostAPartGetsAnotherHolderOfItEvenABusyOne) {
  JointWorld world(2, {.max_pullers_per_source = 1});
  const auto holders = world.holders(2);
  const NodeInfo p = world.node("p");
  const auto pull = world.open(p, "qwen3");
  ASSERT_THAT(pull->sources, SizeIs(2));
  const NodeInfo z = world.holder_of("z", 2);
  ASSERT_TRUE(world.announce(z, {CoreWorld::holding({"other", 1}, 4)}));
  ASSERT_THAT(world.open(world.node("o"), "other")->sources, SizeIs(1));
  ASSERT_TRUE(world.core->drain("h2", true, world.now));  // so that others take z
  ASSERT_THAT(world.open(world.node("q"), "qwen3")->sources, SizeIs(2));
  ASSERT_EQ(world.core->pulls().table().pullers_of(z.incarnation), 2u) << "it is busy";
  world.disconnect(holders[1]);
  world.pass(3s, {holders[0], z});  // h2 is dead
  const auto answer = world.progress(p, *pull);
  ASSERT_TRUE(answer);
  EXPECT_THAT(CoreWorld::names(answer->sources), UnorderedElementsAre("h1", "z"));
}

TEST(JointPulls, APartThatOnlyDrainedNodesHoldKeepsPullersOutButTheOneThatCopiesIt) {
  JointWorld world(2, {.replicas = 1});
  auto alive = world.holders(2);
  ASSERT_TRUE(world.core->drain("h2", true, world.now));
  const NodeInfo c = world.node("c");
  ASSERT_TRUE(world.enroll(c));
  const auto refused = world.open(c, "qwen3");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(refused.error().message(), HasSubstr("only drained nodes hold a part of it: h2;"));
  EXPECT_TRUE(world.open(alive[1], "qwen3")) << "the drained node itself has it";
  alive.push_back(c);
  world.free_bytes["c"] = 5000;
  world.pass(15s, alive);
  EXPECT_THAT(CoreWorld::names(world.open(c, "qwen3")->sources), UnorderedElementsAre("h1", "h2"));
  alive.push_back(world.holder_of("z", 2));
  EXPECT_THAT(world.sources("p"), UnorderedElementsAre("h1", "z"));
  ASSERT_TRUE(world.core->drain("z", true, world.now));
  world.holder("w", kV1);
  EXPECT_TRUE(world.open(world.node("q"), "qwen3")) << "w has all of it";
}

// Copies that must not go.

class JointLetGo : public ::testing::Test {
 protected:
  // "": it may.
  std::string denied(const NodeInfo& node) {
    const auto answer = world_.core->let_go(node.node_id, node.incarnation, kV1, world_.now);
    if (answer) return "";
    EXPECT_EQ(answer.error().code(), ErrorCode::kDenied);
    return answer.error().message();
  }
  JointWorld world_{2};
};

TEST_F(JointLetGo, TheOnlyHolderOfAPartStays) {
  const NodeInfo a = world_.holder_of("a", 1);
  const NodeInfo b = world_.holder_of("b", 2);
  EXPECT_EQ(denied(a),
            "qwen3@1 must stay on a: it is the last copy to rely on; other holders: b (a part of "
            "it)");
  EXPECT_NE(denied(b), "");
}

TEST_F(JointLetGo, OfTwoHoldersOfTheSamePartOneMayGo) {
  const NodeInfo a = world_.holder_of("a", 1);
  const NodeInfo a2 = world_.holder_of("a2", 1);
  world_.holder_of("b", 2);
  EXPECT_EQ(denied(a), "");
  EXPECT_THAT(denied(a2), HasSubstr("a (letting go of it, too), b (a part of it)"));
}

TEST_F(JointLetGo, AHolderOnADrainedOrSilentOrUnverifiedNodeDoesNotCount) {
  const NodeInfo a = world_.holder_of("a", 1);
  const NodeInfo a2 = world_.holder_of("a2", 1);
  ASSERT_TRUE(world_.core->drain("a2", true, world_.now));
  EXPECT_THAT(denied(a), HasSubstr("a2 (drained)"));
  ASSERT_TRUE(world_.core->drain("a2", false, world_.now));
  world_.pass(1s, {a});
  EXPECT_THAT(denied(a), HasSubstr("a2 (not heard of)"));
  ASSERT_TRUE(world_.beat_one(a2));
  ASSERT_TRUE(world_.announce(a2, {part_of(kV1, 1, /*verified=*/false)}));
  EXPECT_THAT(denied(a), HasSubstr("other holders: none"));
  ASSERT_TRUE(world_.announce(a2, {part_of(kV1, 1)}));
  EXPECT_EQ(denied(a), "");
}

TEST_F(JointLetGo, AWholeCopyMayGoWhenOthersHaveAllParts) {
  const NodeInfo w = world_.holder("w", kV1);
  const NodeInfo a = world_.holder_of("a", 1);
  EXPECT_NE(denied(w), "");
  const NodeInfo b = world_.holder_of("b", 2);
  EXPECT_EQ(denied(w), "");
  EXPECT_NE(denied(a), "") << "w is letting go";
  EXPECT_NE(denied(b), "");
}

TEST_F(JointLetGo, APartMayGoWhenAnotherNodeHasAllOfIt) {
  const NodeInfo a = world_.holder_of("a", 1);
  const NodeInfo w = world_.holder("w", kV1);
  EXPECT_EQ(denied(a), "");
  EXPECT_NE(denied(w), "");
}

TEST(JointCopies, AWholeCopyIsMadeFromTheParts) {
  JointWorld world(2, {.replicas = 1});
  const NodeInfo a = world.holder_of("a", 1);
  const NodeInfo c = world.node("c");
  ASSERT_TRUE(world.enroll(c));
  world.free_bytes["c"] = 5000;
  world.pass(15s, {a, c});
  EXPECT_EQ(world.core->replicas().shortages().at(kV1).why,
            "nobody alive has a whole copy to read from");
  const NodeInfo b = world.holder_of("b", 2);
  world.pass(15s, {a, b, c});
  ASSERT_THAT(world.core->replicas().tasks(), SizeIs(1));
  EXPECT_EQ(world.core->replicas().tasks().at(kV1).node_id, "c");
  EXPECT_THAT(world.open(c, "qwen3", 1)->sources, SizeIs(2));
  ASSERT_TRUE(world.announce(c, {CoreWorld::holding(kV1)}));
  world.pass(1s, {a, b, c});
  EXPECT_THAT(world.core->replicas().tasks(), IsEmpty());
  EXPECT_THAT(world.core->replicas().shortages(), IsEmpty());
}

TEST(JointCopies, ADrainNamesTheVersionsOfWhichOnlyTheNodeHasAPart) {
  JointWorld world(2);
  world.holder_of("a", 1);
  world.holder_of("a2", 1);
  world.holder_of("b", 2);
  EXPECT_THAT(world.core->drain("b", true, world.now)->sole_copies, ElementsAre(kV1));
  EXPECT_THAT(world.core->drain("a", true, world.now)->sole_copies, IsEmpty());
  EXPECT_THAT(world.core->drain("a2", true, world.now)->sole_copies, ElementsAre(kV1));
  world.holder("w", kV1);
  EXPECT_THAT(world.core->drain("b", true, world.now)->sole_copies, IsEmpty());
}

}  // namespace
}  // namespace rekindle::coordinator
