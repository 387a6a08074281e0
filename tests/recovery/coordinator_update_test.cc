#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/coordinator/round_wire.h"
#include "recovery/rpc/convert.h"
#include "tests/recovery/coordinator_fixture.h"

// Updates as the core takes them, and as they look on the wire.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Update : public ::testing::Test {
 protected:
  void SetUp() override { world_.pass(3s, {a_}); }
  RoundReport report() {
    RoundReport report;
    report.node_id = "a";
    report.incarnation = a_.incarnation;
    report.sequence = ++sequence_;
    RoundMember member;
    member.session = 1;
    member.group = "g";
    member.instance = "i";
    member.id = kV1;
    report.members.push_back(member);
    return report;
  }
  Result<RoundId> begin(const ModelVersion& id, const std::string& group = "g") {
    return world_.core->begin_update(id, group, {}, world_.now);
  }

  CoreWorld world_;
  NodeInfo a_ = world_.holder("a", kV1);
  std::uint64_t sequence_ = 0;
};

TEST_F(Update, NeedsAVersionThatSomebodyHolds) {
  ASSERT_TRUE(world_.core->report_round(report(), world_.now));
  const auto unknown = begin(kV2);
  EXPECT_EQ(unknown.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(unknown.error().message(), AllOf(HasSubstr("qwen3@2"), HasSubstr("qwen3@1 (ready)")));
  ASSERT_TRUE(world_.core->publish("a", a_.incarnation, kV2, {2, 7}, {2, 8}, 1000, world_.now));
  const auto staging = begin(kV2);
  EXPECT_EQ(staging.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(staging.error().message(), HasSubstr("nobody alive holds all of it"));
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV2, 2)}));
  EXPECT_TRUE(begin(kV2));
}

// Each host of a member reads a share, all of them together one copy.
TEST_F(Update, OfManyHostsReadsSharesFromTheOneHostThatHasTheVersion) {
  constexpr std::size_t kHosts = 12;
  const NodeInfo holder = world_.holder("s", kV2, 2);
  std::vector<NodeInfo> hosts;
  for (std::size_t i = 0; i < kHosts; ++i) {
    hosts.push_back(world_.node(fmt::format("h{}", i)));
    ASSERT_TRUE(world_.enroll(hosts.back()));
    RoundReport serving = report();
    serving.node_id = hosts.back().node_id;
    serving.incarnation = hosts.back().incarnation;
    serving.members[0].instance = hosts.back().node_id;
    ASSERT_TRUE(world_.core->report_round(serving, world_.now));
  }
  const auto open_all = [&] {
    std::size_t served = 0;
    std::vector<PullId> opened;
    for (const NodeInfo& host : hosts) {
      const auto pull = world_.open(host, "qwen3", 2);
      if (!pull || pull->sources.empty()) continue;
      ++served;
      opened.push_back(pull->pull_id);
    }
    for (const PullId& pull : opened) world_.close(pull);
    return served;
  };
  EXPECT_EQ(open_all(), 8u) << "without a round";
  ASSERT_TRUE(begin(kV2));
  EXPECT_EQ(open_all(), kHosts);
}

TEST_F(Update, IsRefusedForARetiringVersion) {
  ASSERT_TRUE(world_.core->report_round(report(), world_.now));
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV2, 2)}));
  ASSERT_TRUE(world_.core->retire(kV2, world_.now));
  const auto begun = begin(kV2);
  EXPECT_EQ(begun.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(begun.error().message(), HasSubstr("retired"));
}

TEST_F(Update, WithoutWorkersIsNotFoundOnceAllHaveReported) {
  EXPECT_EQ(begin(kV1).error().code(), ErrorCode::kNotFound);
  world_.restart();
  ASSERT_TRUE(world_.enroll(a_));
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV1)}));
  EXPECT_EQ(begin(kV1).error().code(), ErrorCode::kUnavailable) << "they may have yet to report";
}

TEST_F(Update, BeginsAfterTheGraceSoThatNobodyIsMissed) {
  const NodeInfo b = world_.holder("b", kV1);
  world_.restart();
  ASSERT_TRUE(world_.enroll(a_));
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV1)}));
  ASSERT_TRUE(world_.core->report_round(report(), world_.now));
  const auto early = begin(kV1);
  EXPECT_EQ(early.error().code(), ErrorCode::kUnavailable) << "b may have workers, too";
  EXPECT_THAT(early.error().message(), HasSubstr("just started"));
  ASSERT_TRUE(world_.enroll(b));
  RoundReport late = report();
  late.node_id = "b";
  late.incarnation = b.incarnation;
  ASSERT_TRUE(world_.core->report_round(late, world_.now));
  world_.pass(world_.timing.dead_after, {a_, b});
  EXPECT_FALSE(world_.core->fleet().grace.active(world_.now));
  const auto begun = begin(kV1);
  ASSERT_TRUE(begun) << begun.error().message();
  EXPECT_EQ(world_.core->rounds().find(*begun)->places().size(), 2u);
}

TEST_F(Update, ReportsAreTakenFromRegisteredAgentsOnly) {
  RoundReport stranger = report();
  stranger.incarnation = world_.node("x").incarnation;
  EXPECT_EQ(world_.core->report_round(stranger, world_.now).error().code(),
            ErrorCode::kUnavailable);
}

TEST_F(Update, EndsInBoundedTimeWhenItsNodeDies) {
  ASSERT_TRUE(world_.core->report_round(report(), world_.now));
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV2, 2)}));
  const auto begun = begin(kV2);
  ASSERT_TRUE(begun);
  world_.pass(2100ms);
  const Round* round = world_.core->rounds().find(*begun);
  ASSERT_NE(round, nullptr);
  EXPECT_TRUE(round->over());
  EXPECT_EQ(round->places().at(0).why, "the node died");
}

TEST_F(Update, IsInTheStatus) {
  ASSERT_TRUE(world_.core->report_round(report(), world_.now));
  ASSERT_TRUE(world_.announce(a_, {CoreWorld::holding(kV2, 2)}));
  ASSERT_TRUE(begin(kV2));
  world_.pass(300ms, {a_});
  const auto status = make_status(*world_.core, world_.now);
  ASSERT_EQ(status.rounds_size(), 1);
  const auto& round = status.rounds(0);
  EXPECT_EQ(round.phase(), "gathering");
  EXPECT_EQ(round.elapsed_ms(), 300u);
  EXPECT_EQ(round.gather_ms(), 300u);
  ASSERT_EQ(round.members_size(), 1);
  EXPECT_EQ(round.members(0).state(), "expected");
  EXPECT_EQ(round.members(0).instance(), "i");
}

TEST_F(Update, OfTheRoundsThatAreOverTheLastOfAGroupIsShown) {
  RoundReport both = report();
  both.members.push_back(both.members[0]);
  both.members[1].session = 2;
  both.members[1].instance = "j";
  both.members[1].group = "h";
  ASSERT_TRUE(world_.core->report_round(both, world_.now));
  ASSERT_TRUE(begin(kV1));
  const auto last = begin(kV1);
  const auto other = begin(kV1, "h");
  const auto shown = rounds_to_show(world_.core->rounds());
  ASSERT_EQ(shown.size(), 2u);
  EXPECT_EQ(shown[0]->number(), *last);
  EXPECT_EQ(shown[1]->number(), *other);
}

proto::RoundReport wire_report() {
  proto::RoundReport report;
  report.set_node_id("a");
  report.set_incarnation(Incarnation::random().to_bytes());
  report.set_device_life("life");
  report.set_sequence(3);
  auto& member = *report.add_members();
  member.set_session(7);
  member.set_group("g");
  member.set_instance("i");
  member.set_rank(2);
  *member.mutable_id() = rpc::to_proto(kV2);
  member.set_device("double:0");
  member.set_state(proto::ROUND_FILLED);
  member.set_round(9);
  *member.mutable_root() = rpc::to_proto(Digest{1, 2});
  *member.mutable_contents() = rpc::to_proto(Digest{3, 4});
  member.set_payload_bytes(100);
  member.set_bucket_bytes(10);
  member.set_owner(true);
  member.add_communicators("1-1");
  member.set_spread_bytes(100);
  member.set_worker_lost(true);
  auto& phase = *member.add_phases();
  phase.set_name("copy");
  phase.set_elapsed_us(1234);
  auto& id = *report.add_ids();
  id.set_round(9);
  id.set_party(1);
  id.set_id("id");
  auto& described = *report.add_described();
  *described.mutable_contents() = rpc::to_proto(Digest{3, 4});
  described.add_keys(11);
  described.add_bytes(100);
  return report;
}

TEST(RoundWire, AReportIsReadAsItWasWritten) {
  const auto report = from_proto(wire_report(), TimePoint());
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->device_life, "life");
  EXPECT_EQ(report->sequence, 3u);
  ASSERT_EQ(report->members.size(), 1u);
  const RoundMember& member = report->members[0];
  EXPECT_EQ(member.session, 7u);
  EXPECT_EQ(member.rank, 2u);
  EXPECT_EQ(member.id, kV2);
  EXPECT_EQ(member.state, RoundMemberState::kFilled);
  EXPECT_EQ(member.round, 9u);
  EXPECT_EQ(member.root, (Digest{1, 2}));
  EXPECT_EQ(member.contents, (Digest{3, 4}));
  EXPECT_TRUE(member.owner);
  EXPECT_THAT(member.communicators, ::testing::ElementsAre("1-1"));
  EXPECT_TRUE(member.worker_lost);
  ASSERT_EQ(member.phases.size(), 1u);
  EXPECT_EQ(member.phases[0].name, "copy");
  EXPECT_EQ(member.phases[0].elapsed_us, 1234u);
  EXPECT_EQ(report->ids.at(0).id, "id");
  ASSERT_EQ(report->described.size(), 1u);
  EXPECT_EQ(report->described[0].contents, (Digest{3, 4}));
  EXPECT_THAT(report->described[0].pieces, ::testing::ElementsAre(WantedPiece{11, 100}));
}

struct Garbage {
  const char* name;
  void (*spoil)(proto::RoundReport& report);
};

class RoundWireGarbage : public ::testing::TestWithParam<Garbage> {};

TEST_P(RoundWireGarbage, IsRefusedInOneLine) {
  proto::RoundReport report = wire_report();
  GetParam().spoil(report);
  const auto read = from_proto(report, TimePoint());
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(read.error().message().find('\n'), std::string::npos);
}

const std::string kLong(513, 'x');

INSTANTIATE_TEST_SUITE_P(
    All, RoundWireGarbage,
    ::testing::Values(
        Garbage{"PiecesWithoutSizes",
                [](proto::RoundReport& report) { report.mutable_described(0)->add_keys(12); }},
        Garbage{"MoreBytesThanANumberHas",
                [](proto::RoundReport& report) {
                  report.mutable_described(0)->add_keys(12);
                  report.mutable_described(0)->add_bytes(~std::uint64_t{0});
                }},
        Garbage{"Incarnation", [](auto& r) { r.set_incarnation("short"); }},
        Garbage{"NodeId", [](auto& r) { r.set_node_id(kLong); }},
        Garbage{"Life", [](auto& r) { r.set_device_life(kLong); }},
        Garbage{"Members",
                [](auto& r) {
                  for (int i = 0; i < 4096; ++i) *r.add_members() = r.members(0);
                }},
        Garbage{"Ids",
                [](auto& r) {
                  for (int i = 0; i < 4096; ++i) *r.add_ids() = r.ids(0);
                }},
        Garbage{"IdBytes", [](auto& r) { r.mutable_ids(0)->set_id(std::string(4097, 'x')); }},
        Garbage{"Group", [](auto& r) { r.mutable_members(0)->set_group(kLong); }},
        Garbage{"Instance", [](auto& r) { r.mutable_members(0)->set_instance(kLong); }},
        Garbage{"Device", [](auto& r) { r.mutable_members(0)->set_device(kLong); }},
        Garbage{"Model", [](auto& r) { r.mutable_members(0)->mutable_id()->set_model("../etc"); }},
        Garbage{"State",
                [](auto& r) {
                  r.mutable_members(0)->set_state(static_cast<proto::RoundMemberState>(99));
                }},
        Garbage{"Communicator", [](auto& r) { r.mutable_members(0)->add_communicators(kLong); }},
        Garbage{"Communicators",
                [](auto& r) {
                  for (int i = 0; i < 64; ++i) r.mutable_members(0)->add_communicators("c");
                }}),
    [](const auto& garbage) { return garbage.param.name; });

// A newer agent may have more of them.
TEST(RoundWire, PhasesThatAreNotKnownAreLeftOutAndTheReportCounts) {
  proto::RoundReport report;
  report.set_node_id("a");
  report.set_incarnation(std::string(16, 'i'));
  auto& member = *report.add_members();
  member.mutable_id()->set_model("m");
  member.mutable_id()->set_version(1);
  for (const char* name : {"copy", "lunch\nbreak"}) member.add_phases()->set_name(name);
  const auto taken = from_proto(report, TimePoint());
  ASSERT_TRUE(taken) << taken.error().message();
  ASSERT_EQ(taken->members.size(), 1u);
  EXPECT_TRUE(taken->members[0].phases.empty());
}

TEST(RoundWire, OrdersSayWhatTheAgentNeeds) {
  RoundOrder order;
  order.round = 9;
  order.id = kV2;
  order.group = "g";
  PartyOrder party;
  party.party = 2;
  party.state = PartyState::kSpreading;
  party.communicator = "1-1";
  party.id = "id";
  party.bucket_bytes = 64;
  party.ranks = 3;
  party.owners = {0, 2};
  party.members = {{7, 1}};
  order.parties.push_back(party);
  const auto message = to_proto(std::vector{order});
  ASSERT_EQ(message.rounds_size(), 1);
  const auto& sent = message.rounds(0).parties(0);
  EXPECT_EQ(message.rounds(0).round(), 9u);
  EXPECT_EQ(sent.state(), proto::PARTY_SPREADING);
  EXPECT_EQ(sent.owners(1), 2u);
  EXPECT_EQ(sent.members(0).session(), 7u);
  EXPECT_EQ(sent.members(0).rank(), 1u);
}

}  // namespace
}  // namespace rekindle::coordinator
