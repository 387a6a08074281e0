// An agent's members of broadcast rounds. The coordinator and the sessions are in the test's hands.
#include "recovery/worker/host_rounds.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"

namespace rekindle::worker {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kRound = 100;

struct Effects final : RoundEffects {
  void spread(const device::SpreadOrder& order) override { spreads.push_back(order); }
  void stop_spread(SessionId session, const std::string& why) override {
    stops.emplace_back(session, why);
  }
  void make_meeting_id(std::uint64_t number) override { ids.push_back(number); }
  void left_round(SessionId session, bool all, const std::string& why) override {
    left.push_back({session, all, why});
  }
  struct Left {
    SessionId session = 0;
    bool all = false;
    std::string why;
  };
  std::vector<device::SpreadOrder> spreads;
  std::vector<std::pair<SessionId, std::string>> stops;
  std::vector<std::uint64_t> ids;
  std::vector<Left> left;
};

class RoundsTest : public ::testing::Test {
 protected:
  // --- the coordinator
  proto::RoundReport report() { return rounds_.report("life", 1000ms, now_); }
  void obey() {
    const auto said = report();
    obey(said.sequence());
  }
  void obey(std::uint64_t sequence) {
    orders_.set_revision(orders_.revision() + 1);
    rounds_.obey(orders_, sequence, now_);
  }
  proto::RoundOrder& order(std::uint64_t version = 2, const std::string& group = "g") {
    auto& order = *orders_.add_rounds();
    order.set_round(kRound + static_cast<std::uint64_t>(orders_.rounds_size()) - 1);
    order.mutable_id()->set_model("m");
    order.mutable_id()->set_version(version);
    order.set_group(group);
    order.set_gathering(true);
    return order;
  }
  proto::PartyOrder& party(proto::PartyState state, SessionId session = 1) {
    auto& order = *orders_.mutable_rounds(0);
    order.set_gathering(false);
    order.clear_parties();
    auto& party = *order.add_parties();
    party.set_party(1);
    party.set_state(state);
    party.set_communicator("1-1");
    party.set_id("meet here");
    party.set_bucket_bytes(64);
    party.set_ranks(3);
    party.add_owners(0);
    party.add_owners(2);
    party.set_why("rank 0 of i on b: died");
    auto& place = *party.add_members();
    place.set_session(session);
    place.set_rank(1);
    return party;
  }
  proto::RoundMember member(SessionId session = 1) {
    const auto said = report();
    for (const auto& member : said.members()) {
      if (member.session() == session) return member;
    }
    return {};
  }
  // --- sessions
  void attach(SessionId session = 1, std::uint64_t version = 2,
              const std::string& device = "double:0") {
    rounds_.attach(session, {"g", "i" + std::to_string(session), 0, "m", device});
    (void)rounds_.choose(session, {"m", version});
  }
  void joined(SessionId session = 1, RoundMember::Bytes here = RoundMember::Bytes::kNone) {
    EXPECT_TRUE(rounds_.enters(session));
    rounds_.hand_over(session, {1, 2}, std::nullopt);
    rounds_.joined({session, 64, {3, 4}, 5000, {"0-7"}}, here);
  }
  // What the session wants: two pieces.
  void want(const Digest& contents = {3, 4}, SessionId session = 1) {
    rounds_.want(session, contents, 5000,
                 std::make_shared<std::vector<bucket::PieceKey>>(
                     std::vector<bucket::PieceKey>{{11, 4000}, {12, 1000}}));
  }
  // A round gathers, and session 1 has joined it; the coordinator knows.
  void gathered() {
    order();
    obey();
    attach();
    joined();
    obey();
  }
  void spreading() {
    gathered();
    party(proto::PARTY_SPREADING);
    obey();
    ASSERT_EQ(effects_.spreads.size(), 1u);
  }
  device::SpreadOver over(std::optional<Error> error = std::nullopt) {
    device::SpreadOver over;
    over.session = 1;
    over.error = std::move(error);
    return over;
  }

  TimePoint now_{1000s};
  Effects effects_;
  HostRounds rounds_{effects_};
  proto::RoundOrders orders_;
};

TEST_F(RoundsTest, SessionsWithoutAGroupAreNobodysMembers) {
  rounds_.attach(1, {"", "i", 0, "m", "double:0"});
  EXPECT_FALSE(rounds_.has_members());
  EXPECT_FALSE(rounds_.choose(1, {"m", 2}));
  EXPECT_FALSE(rounds_.due());
}

TEST_F(RoundsTest, WithoutBroadcastsASessionWaitsForNoParty) {
  HostRounds apart(effects_, /*broadcasts=*/false);
  order(2);
  apart.obey(orders_, apart.report("life", 1000ms, now_).sequence(), now_);
  apart.attach(1, {"g", "i", 0, "m", "double:0"});
  EXPECT_FALSE(apart.choose(1, {"m", 2}));
  EXPECT_FALSE(apart.enters(1));
  apart.hand_over(1, {1, 2}, std::nullopt);
  apart.commit(1);
  const auto said = apart.report("life", 1000ms, now_);
  ASSERT_EQ(said.members_size(), 1);
  EXPECT_EQ(said.members(0).round(), 0u);
  EXPECT_EQ(said.members(0).state(), proto::ROUND_SERVING);
  EXPECT_EQ(said.members(0).id().version(), 2u);
}

TEST_F(RoundsTest, AMemberIsReportedFromItsAttachToItsEnd) {
  attach(1, 1);
  EXPECT_EQ(report().members(0).id().version(), 0u) << "it serves nothing yet";
  rounds_.commit(1);
  ASSERT_TRUE(rounds_.due());
  auto said = report();
  EXPECT_FALSE(rounds_.due()) << "said";
  EXPECT_EQ(said.device_life(), "life");
  EXPECT_EQ(said.wait_ms(), 1000u);
  ASSERT_EQ(said.members_size(), 1);
  EXPECT_EQ(said.members(0).id().version(), 1u);
  EXPECT_EQ(said.members(0).group(), "g");
  EXPECT_EQ(said.members(0).state(), proto::ROUND_SERVING);
  EXPECT_EQ(said.members(0).round(), 0u);
  const auto first = said.sequence();
  rounds_.detach(1, now_);
  ASSERT_TRUE(rounds_.due()) << "one last report";
  said = report();
  EXPECT_EQ(said.members_size(), 0);
  EXPECT_EQ(said.wait_ms(), 0u);
  EXPECT_GT(said.sequence(), first);
  EXPECT_FALSE(rounds_.due());
}

TEST_F(RoundsTest, WhileARoundGathersItsVersionIsTheGroups) {
  attach(1, 3);
  EXPECT_FALSE(rounds_.known().gathers("m", "g"));
  order(2);
  obey();
  EXPECT_EQ(rounds_.known().gathers("m", "g"), 2u);
  EXPECT_FALSE(rounds_.known().gathers("m", "h"));
  EXPECT_FALSE(rounds_.known().gathers("n", "g"));
  EXPECT_FALSE(rounds_.known().gathers("m", "")) << "without a group";
  EXPECT_EQ(rounds_.news_for(1, {"m", 3}), 2u) << "an update may go back";
  EXPECT_FALSE(rounds_.news_for(1, {"m", 2}));
  orders_.mutable_rounds(0)->set_group("");
  obey();
  EXPECT_EQ(rounds_.known().gathers("m", "h"), 2u) << "a round of all groups";
  orders_.mutable_rounds(0)->set_gathering(false);
  obey();
  EXPECT_FALSE(rounds_.known().gathers("m", "g"));
}

TEST_F(RoundsTest, WhoWasAwayHearsOfTheGroupsLastRoundAfterwards) {
  attach(1, 1);
  attach(2, 3);
  order(2);
  obey();
  orders_.clear_rounds();
  obey();
  EXPECT_EQ(rounds_.news_for(1, {"m", 1}), 2u);
  EXPECT_FALSE(rounds_.news_for(2, {"m", 3})) << "it has a newer one";
  EXPECT_FALSE(rounds_.news_for(9, {"m", 1})) << "no member";
  auto& later = order(4, "");
  later.set_round(kRound + 1);
  later.set_gathering(false);
  obey();
  EXPECT_EQ(rounds_.news_for(1, {"m", 1}), 4u) << "the newest round counts";
}

TEST_F(RoundsTest, ContentsAreDescribedOnceAndAgainIfAReportIsNotAnswered) {
  attach();
  want();
  const auto lost = report();
  ASSERT_EQ(lost.described_size(), 1);
  EXPECT_EQ(rpc::from_proto(lost.described(0).contents()), (Digest{3, 4}));
  EXPECT_THAT(lost.described(0).keys(), ElementsAre(11u, 12u));
  EXPECT_THAT(lost.described(0).bytes(), ElementsAre(4000u, 1000u));
  EXPECT_EQ(report().described_size(), 0) << "that report is still under way";
  rounds_.unanswered();
  const auto heard = report();
  EXPECT_EQ(heard.described_size(), 1);
  obey(heard.sequence());
  EXPECT_EQ(report().described_size(), 0);
  attach(2);
  want({3, 4}, 2);
  EXPECT_EQ(report().described_size(), 0) << "the same again, by another session";
}

TEST_F(RoundsTest, AReportDescribesOnlySoManyPiecesAndTheNextOneTheRest) {
  const auto large = std::make_shared<std::vector<bucket::PieceKey>>(150'000);
  attach(1);
  attach(2);
  rounds_.want(1, Digest{1}, 1, large);
  rounds_.want(2, Digest{2}, 1, large);
  EXPECT_EQ(report().described_size(), 1);
  EXPECT_TRUE(rounds_.due()) << "at once";
  EXPECT_EQ(report().described_size(), 1);
  EXPECT_FALSE(rounds_.due());
}

// Its worker loads by itself, commits and detaches. The party must not end because of that.
TEST_F(RoundsTest, AMemberWhoseDeviceWentThroughWithoutItsWorkerStaysUntilThatIsHeard) {
  spreading();
  (void)report();
  auto done = over();
  done.worker_lost = Error(ErrorCode::kPeerLost, "its worker cannot read the buckets");
  rounds_.spread_over(done, now_);
  rounds_.detach(1, now_);
  EXPECT_EQ(member().state(), proto::ROUND_FAILED);
  EXPECT_TRUE(member().worker_lost());
  obey();
  EXPECT_FALSE(rounds_.has_members());
}

// Its worker has not committed: the next update must not take it for ready.
TEST_F(RoundsTest, AMemberWhoseRoundIsOverServesTheVersionOnlyAfterItsCommit) {
  spreading();
  auto done = over();
  done.more = true;
  rounds_.spread_over(done, now_);
  orders_.clear_rounds();
  obey();
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
  EXPECT_EQ(member().id().version(), 0u);
  rounds_.commit(1);
  EXPECT_EQ(member().id().version(), 2u);
}

// For example one that has started anew.
TEST_F(RoundsTest, ContentsAreDescribedToACoordinatorThatAsks) {
  attach();
  want();
  obey();
  *orders_.add_describe() = rpc::to_proto(Digest{3, 4});
  *orders_.add_describe() = rpc::to_proto(Digest{9, 9});
  obey();
  EXPECT_TRUE(rounds_.due()) << "at once";
  const auto said = report();
  ASSERT_EQ(said.described_size(), 1) << "nobody here has the others";
  EXPECT_EQ(rpc::from_proto(said.described(0).contents()), (Digest{3, 4}));
  orders_.clear_describe();
  obey(said.sequence());
  EXPECT_EQ(report().described_size(), 0);
}

TEST_F(RoundsTest, ARoundOfSomePiecesLeavesTheRestToTheHost) {
  gathered();
  party(proto::PARTY_SPREADING)
      .mutable_members(0)
      ->mutable_pieces()
      ->CopyFrom(rpc::to_proto(TileRuns{{1, 2}}));
  obey();
  ASSERT_EQ(effects_.spreads.size(), 1u);
  EXPECT_THAT(effects_.spreads[0].pieces, ElementsAre(std::pair(1u, 2u)));
  auto done = over();
  done.bytes = 1000;
  done.more = true;
  rounds_.spread_over(done, now_);
  EXPECT_EQ(member().state(), proto::ROUND_FILLED);
  EXPECT_EQ(member().spread_bytes(), 1000u);
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_FALSE(effects_.left[0].all) << "its host brings the rest";
  rounds_.device_over({.session = 1}, now_);
  EXPECT_EQ(effects_.left.size(), 1u);
  EXPECT_EQ(member().spread_bytes(), 1000u);
  rounds_.commit(1);
  EXPECT_EQ(member().state(), proto::ROUND_READY);
}

TEST_F(RoundsTest, AnOrderWithPiecesOutOfOrderIsNotCarriedOut) {
  gathered();
  party(proto::PARTY_SPREADING)
      .mutable_members(0)
      ->mutable_pieces()
      ->CopyFrom(rpc::to_proto(TileRuns{{4, 5}, {1, 2}}));
  obey();
  EXPECT_TRUE(effects_.spreads.empty());
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_THAT(effects_.left[0].why, HasSubstr("out of order"));
}

// Each rank fetches into its own copy, and keeps there.
TEST_F(RoundsTest, RanksHereWithDifferentContentsShareNoCopy) {
  gathered();
  attach(2);
  EXPECT_TRUE(rounds_.enters(2));
  rounds_.hand_over(2, {1, 2}, std::nullopt);
  rounds_.joined({2, 64, {5, 6}, 5000, {}}, RoundMember::Bytes::kFetchable);
  auto& spread = party(proto::PARTY_SPREADING);
  spread.set_owners_fetch(true);
  spread.set_owners(0, 1);
  auto& place = *spread.add_members();
  place.set_session(2);
  place.set_rank(2);
  obey();
  ASSERT_EQ(effects_.spreads.size(), 2u);
  for (const auto& order : effects_.spreads) {
    EXPECT_EQ(order.keep_count, 1u);
    EXPECT_THAT(order.fetched, ElementsAre(order.rank == 1 ? 0u : 1u));
  }
}

TEST_F(RoundsTest, PhasesOfTheWorkerAndTheSpreadOfItsDeviceAreReported) {
  spreading();
  rpc::PhaseTimes phases;
  phases.Add()->set_name("declare");
  phases.Add()->set_name("copy");
  phases[1].set_ago_us(50'000);
  rounds_.report_phases(1, phases, now_);
  rounds_.report_phases(99, phases, now_);  // of nobody
  now_ += 10ms;
  auto done = over();
  done.meet = 2ms;
  done.elapsed = 5ms;
  done.verify = 1ms;
  rounds_.spread_over(done, now_);
  ASSERT_TRUE(rounds_.due());
  // Each report says how long ago they began, from when it is sent.
  for (const std::uint64_t later_us : {0u, 4000u}) {
    const auto said = member();
    ASSERT_EQ(said.phases_size(), 4);
    EXPECT_EQ(said.phases(0).name(), "declare");
    EXPECT_FALSE(said.phases(0).has_ago_us());
    EXPECT_EQ(said.phases(1).name(), "copy");
    EXPECT_EQ(said.phases(1).ago_us(), 60'000u + later_us);
    EXPECT_EQ(said.phases(2).name(), "spread");
    EXPECT_EQ(said.phases(2).elapsed_us(), 7000u);
    EXPECT_EQ(said.phases(2).ago_us(), 7000u + later_us);
    EXPECT_EQ(said.phases(3).name(), "verify");
    EXPECT_EQ(said.phases(3).elapsed_us(), 1000u);
    EXPECT_EQ(said.phases(3).ago_us(), 5000u + later_us) << "since the devices had met";
    now_ += 4ms;
  }
}

TEST_F(RoundsTest, ASessionJoinsWhenItHasItsBucketsAndNoSooner) {
  order();
  obey();
  rounds_.attach(1, {"g", "i", 3, "m", "double:0"});
  EXPECT_TRUE(rounds_.choose(1, {"m", 2}));
  EXPECT_EQ(member().round(), 0u);
  EXPECT_EQ(member().id().version(), 0u) << "it has not arrived";
  joined(1, RoundMember::Bytes::kAll);
  const auto said = member();
  EXPECT_EQ(said.state(), proto::ROUND_JOINED);
  EXPECT_EQ(said.round(), kRound);
  EXPECT_EQ(said.id().version(), 2u);
  EXPECT_EQ(said.rank(), 3u);
  EXPECT_EQ(rekindle::rpc::from_proto(said.root()).bytes[0], 1u);
  EXPECT_EQ(rekindle::rpc::from_proto(said.contents()).bytes[1], 4u);
  EXPECT_EQ(said.payload_bytes(), 5000u);
  EXPECT_EQ(said.bucket_bytes(), 64u);
  EXPECT_TRUE(said.owner());
  EXPECT_THAT(said.communicators(), ElementsAre("0-7"));
  EXPECT_EQ(rounds_.phase_of(1), "joined");
}

TEST_F(RoundsTest, AnotherVersionOrALateOneDoesNotJoin) {
  order();
  obey();
  attach(1, 1);
  EXPECT_FALSE(rounds_.enters(1));
  rounds_.attach(2, {"g", "i", 0, "m", "double:0"});
  EXPECT_TRUE(rounds_.choose(2, {"m", 2}));
  orders_.mutable_rounds(0)->set_gathering(false);
  obey();
  EXPECT_FALSE(rounds_.enters(2)) << "its copy took too long";
  rounds_.hand_over(2, {1, 2}, std::nullopt);
  EXPECT_EQ(member(2).state(), proto::ROUND_SERVING);
  EXPECT_EQ(member(2).id().version(), 0u) << "it serves nothing yet";
  rounds_.commit(2);
  EXPECT_EQ(member(2).id().version(), 2u);
  EXPECT_THAT(effects_.left, IsEmpty());
}

TEST_F(RoundsTest, ARetiredVersionIsNoNewsAnyMore) {
  attach(1, 1);
  rounds_.commit(1);
  order();
  orders_.mutable_rounds(0)->set_gathering(false);
  obey();
  EXPECT_EQ(rounds_.news_for(1, {"m", 1}), 2u);
  rounds_.retired({"m", 2});
  EXPECT_EQ(rounds_.news_for(1, {"m", 1}), std::nullopt);
}

TEST_F(RoundsTest, OrdersThatNobodyAsksForAnyMoreAreForgotten) {
  order();
  obey();
  EXPECT_EQ(rounds_.known().gathers("m", "g"), 2u);
  rounds_.forget_orders();
  EXPECT_EQ(rounds_.known().gathers("m", "g"), std::nullopt);
}

TEST_F(RoundsTest, WithoutADeviceOrItsChannelItIsAlone) {
  order();
  obey();
  rounds_.attach(1, {"g", "i1", 0, "m", ""});
  EXPECT_FALSE(rounds_.choose(1, {"m", 2})) << "nothing will bring it";
  EXPECT_FALSE(rounds_.enters(1));
  rounds_.hand_over(1, {1, 2}, "on no device");
  attach(2);
  EXPECT_TRUE(rounds_.enters(2));
  rounds_.hand_over(2, {1, 2}, "no device process");
  for (const SessionId session : {1u, 2u}) {
    EXPECT_EQ(member(session).state(), proto::ROUND_ALONE);
    EXPECT_EQ(member(session).round(), kRound);
    EXPECT_EQ(member(session).id().version(), 2u);
  }
  EXPECT_EQ(member(2).why(), "no device process");
  ASSERT_EQ(effects_.left.size(), 2u);
  EXPECT_FALSE(effects_.left[0].all);
}

TEST_F(RoundsTest, WhoDetachesToAttachToTheRoundIsStillExpected) {
  rounds_.attach(1, {"g", "i", 0, "m", "double:0"});
  (void)rounds_.choose(1, {"m", 1});
  rounds_.commit(1);
  order();
  obey();
  rounds_.detach(1, now_);
  EXPECT_EQ(member(1).id().version(), 1u);
  rounds_.attach(2, {"g", "i", 0, "m", "double:0"});
  EXPECT_TRUE(rounds_.choose(2, {"m", 2}));
  const auto said = report();
  ASSERT_EQ(said.members_size(), 1) << "its new session speaks for it";
  EXPECT_EQ(said.members(0).session(), 2u);
}

TEST_F(RoundsTest, WhoCommitsAndDetachesAtOnceIsReadyForTheCoordinator) {
  spreading();
  rounds_.spread_over(over(), now_);
  rounds_.commit(1);
  rounds_.detach(1, now_);
  rounds_.attach(2, {"g", "i1", 0, "m", "double:0"});  // the same rank again
  EXPECT_EQ(member(1).state(), proto::ROUND_READY);
  EXPECT_EQ(member(1).round(), kRound);
  obey();
  EXPECT_TRUE(rounds_.due()) << "the coordinator has not heard that it has gone";
  const auto said = report();
  ASSERT_EQ(said.members_size(), 1) << "the coordinator has heard of it";
  EXPECT_EQ(said.members(0).session(), 2u);
}

TEST_F(RoundsTest, WhoDetachesWithEveryByteAndNoCommitIsFilledForTheCoordinator) {
  spreading();
  rounds_.spread_over(over(), now_);
  rounds_.detach(1, now_);
  EXPECT_EQ(member().state(), proto::ROUND_FILLED) << "its party has lost nothing";
  obey();
  EXPECT_FALSE(rounds_.has_members());
}

TEST_F(RoundsTest, AResultThatTheCoordinatorKnowsEndsWithItsSession) {
  spreading();
  rounds_.spread_over(over(), now_);
  rounds_.commit(1);
  obey();
  rounds_.detach(1, now_);
  EXPECT_FALSE(rounds_.has_members());
}

TEST_F(RoundsTest, AResultIsForgottenWhenTheCoordinatorStaysSilent) {
  spreading();
  rounds_.spread_over(over(), now_);
  rounds_.commit(1);
  rounds_.detach(1, now_);
  now_ += RoundTimes{}.remember - 1ms;
  rounds_.check(now_);
  EXPECT_TRUE(rounds_.has_members());
  now_ += 1ms;
  rounds_.check(now_);
  EXPECT_FALSE(rounds_.has_members());
}

TEST_F(RoundsTest, AMemberThatServesNothingYetHearsOfTheVersionThatItHas) {
  attach(1);
  order();
  obey();
  EXPECT_EQ(rounds_.news_for(1, {"m", 2}), 2u);
  rounds_.detach(1, now_);
  rounds_.attach(2, {"g", "i1", 0, "m", "double:0"});
  EXPECT_TRUE(rounds_.choose(2, {"m", 2}));
  ASSERT_EQ(report().members_size(), 1) << "its new session takes its place";
  EXPECT_FALSE(rounds_.news_for(2, {"m", 2})) << "it takes part";
}

// --- from the meeting of the parties on

TEST_F(RoundsTest, AMeetingIdIsMadeOnceAndToldUntilTheyMeet) {
  gathered();
  party(proto::PARTY_MEETING).set_make_id(true);
  obey();
  obey();
  ASSERT_THAT(effects_.ids, ElementsAre(1));
  EXPECT_EQ(report().ids_size(), 0);
  rounds_.meeting_id(1, std::string("meet here"));
  ASSERT_TRUE(rounds_.due());
  const auto said = report();
  ASSERT_EQ(said.ids_size(), 1);
  EXPECT_EQ(said.ids(0).round(), kRound);
  EXPECT_EQ(said.ids(0).party(), 1u);
  EXPECT_EQ(said.ids(0).id(), "meet here");
  party(proto::PARTY_SPREADING);
  obey();
  EXPECT_EQ(report().ids_size(), 0);
}

TEST_F(RoundsTest, WhyThereIsNoMeetingIdIsTold) {
  gathered();
  party(proto::PARTY_MEETING).set_make_id(true);
  obey();
  rounds_.meeting_id(1, fail(ErrorCode::kNotFound, "this build has no NCCL"));
  EXPECT_EQ(report().ids(0).problem(), "this build has no NCCL");
}

TEST_F(RoundsTest, ItSpreadsOnceAsOrderedAndIsFilled) {
  spreading();
  const auto& order = effects_.spreads.front();
  EXPECT_EQ(order.session, 1u);
  EXPECT_EQ(order.communicator, "1-1");
  EXPECT_EQ(order.id, "meet here");
  EXPECT_EQ(order.rank, 1u);
  EXPECT_EQ(order.ranks, 3u);
  EXPECT_EQ(order.bucket_bytes, 64u);
  EXPECT_THAT(order.owners, ElementsAre(0, 2));
  EXPECT_EQ(member().state(), proto::ROUND_SPREADING);
  EXPECT_EQ(rounds_.phase_of(1), "spreading");
  obey();
  EXPECT_EQ(effects_.spreads.size(), 1u);
  rounds_.progress(1, 700);
  ASSERT_TRUE(rounds_.due());
  EXPECT_EQ(*rounds_.due(), now_ + 200ms) << "at most five times a second";
  EXPECT_EQ(member().spread_bytes(), 700u);
  rounds_.spread_over(over(), now_);
  EXPECT_EQ(member().state(), proto::ROUND_FILLED);
  EXPECT_EQ(member().spread_bytes(), 5000u);
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_TRUE(effects_.left[0].all);
  rounds_.commit(1);
  EXPECT_EQ(member().state(), proto::ROUND_READY);
  orders_.clear_rounds();
  obey();
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
  EXPECT_EQ(member().round(), 0u);
}

TEST_F(RoundsTest, WhatWasReadyBeforeTheRoundWasOverIsReadyAfterIt) {
  spreading();
  rounds_.commit(1);  // overtakes the event of the device process
  EXPECT_EQ(member().state(), proto::ROUND_SPREADING);
  rounds_.device_over({.session = 1}, now_);
  EXPECT_EQ(member().state(), proto::ROUND_READY);
  EXPECT_EQ(member().spread_bytes(), 5000u);
}

TEST_F(RoundsTest, ASpreadThatFailsLeavesItAloneUntilItIsFilledOtherwise) {
  spreading();
  rounds_.progress(1, 700);
  rounds_.spread_over(over(Error(ErrorCode::kTimeout, "no progress")), now_);
  EXPECT_EQ(member().state(), proto::ROUND_ALONE);
  EXPECT_EQ(member().why(), "no progress");
  EXPECT_EQ(member().spread_bytes(), 700u);
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_FALSE(effects_.left[0].all);
  rounds_.device_over({.session = 1}, now_);
  EXPECT_EQ(member().state(), proto::ROUND_FILLED);
  EXPECT_EQ(member().spread_bytes(), 700u) << "the rest was no broadcast";
  EXPECT_TRUE(effects_.left.back().all);
}

TEST_F(RoundsTest, APartyThatIsStoppedIsStoppedHereOnce) {
  spreading();
  party(proto::PARTY_STOPPED);
  obey();
  obey();
  ASSERT_EQ(effects_.stops.size(), 1u);
  EXPECT_EQ(effects_.stops[0].second, "rank 0 of i on b: died");
  EXPECT_EQ(member().state(), proto::ROUND_ALONE);
  ASSERT_EQ(effects_.left.size(), 1u);
  rounds_.spread_over(over(Error(ErrorCode::kStale, "stopped")), now_);
  EXPECT_EQ(effects_.left.size(), 1u);
}

TEST_F(RoundsTest, OneThatWasDoneWhenItsPartyWasStoppedIsFilled) {
  spreading();
  party(proto::PARTY_STOPPED);
  obey();
  rounds_.spread_over(over(), now_);
  EXPECT_EQ(member().state(), proto::ROUND_FILLED);
}

TEST_F(RoundsTest, WhoIsInNoPartyGoesOnAloneOnceTheCoordinatorHasHeardOfIt) {
  order();
  obey();
  attach();
  joined();
  orders_.mutable_rounds(0)->set_gathering(false);
  obey(1);  // the answer to an earlier report
  EXPECT_THAT(effects_.stops, IsEmpty());
  obey();
  EXPECT_THAT(effects_.stops, ElementsAre(::testing::Key(1)));
  EXPECT_EQ(member().state(), proto::ROUND_ALONE);
}

TEST_F(RoundsTest, ARoundThatIsGoneReleasesWhoWaitsAndNotWhoSpreads) {
  gathered();
  orders_.clear_rounds();
  obey();
  EXPECT_THAT(effects_.stops, ElementsAre(::testing::Key(1)));
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
  EXPECT_EQ(member().id().version(), 0u) << "until its commit";
}

TEST_F(RoundsTest, WhatSpreadsEndsWithoutACoordinator) {
  spreading();
  orders_.clear_rounds();
  obey();
  EXPECT_THAT(effects_.stops, IsEmpty());
  EXPECT_EQ(member().state(), proto::ROUND_SPREADING);
  rounds_.spread_over(over(), now_);
  EXPECT_TRUE(effects_.left.back().all);
  obey();
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
}

TEST_F(RoundsTest, ASilentCoordinatorIsNotWaitedForLongerThanItsTime) {
  gathered();
  (void)report();
  rounds_.unanswered();
  rounds_.check(now_ + 9999ms);
  EXPECT_THAT(effects_.stops, IsEmpty());
  rounds_.check(now_ + 10s);
  ASSERT_THAT(effects_.stops, ElementsAre(::testing::Key(1)));
  EXPECT_THAT(effects_.stops[0].second, HasSubstr("does not answer"));
  EXPECT_FALSE(rounds_.known().gathers("m", "g"));
}

TEST_F(RoundsTest, OneThatJoinsARoundThatIsOverIsReleasedAtOnce) {
  order();
  obey();
  attach();
  EXPECT_TRUE(rounds_.enters(1));
  rounds_.hand_over(1, {1, 2}, std::nullopt);
  orders_.clear_rounds();
  obey();
  rounds_.joined({1, 64, {3, 4}, 5000, {}}, RoundMember::Bytes::kNone);
  EXPECT_THAT(effects_.stops, ElementsAre(::testing::Key(1)));
  EXPECT_EQ(member().state(), proto::ROUND_SERVING);
}

TEST_F(RoundsTest, Row39AWorkerThatDiesAmidTheSpreadIsAMemberUntilItsDeviceIsDone) {
  spreading();
  rounds_.fail(1, "died (pid 7)", now_);
  auto said = member();
  EXPECT_EQ(said.state(), proto::ROUND_SPREADING);
  EXPECT_TRUE(said.worker_lost());
  rounds_.check(now_ + 6s);
  EXPECT_EQ(member().session(), 1u);
  rounds_.spread_over(over(), now_);
  said = member();
  EXPECT_EQ(said.state(), proto::ROUND_FAILED);
  EXPECT_EQ(said.why(), "died (pid 7)");
  EXPECT_TRUE(said.worker_lost()) << "its party is none that failed";
  EXPECT_THAT(effects_.left, IsEmpty()) << "there is no session";
  rounds_.check(now_ + 5s);
  EXPECT_FALSE(rounds_.has_members());
}

TEST_F(RoundsTest, Row39WhatItsDeviceDiscardsWasNotGivenByBroadcast) {
  spreading();
  rounds_.progress(1, 700);
  rounds_.fail(1, "died (pid 7)", now_);
  auto discarded = over();
  discarded.bytes = 900;
  discarded.worker_lost = Error(ErrorCode::kPeerLost, "it has gone");
  rounds_.spread_over(discarded, now_);
  EXPECT_EQ(member().spread_bytes(), 900u);
  EXPECT_TRUE(member().worker_lost()) << "its party is none that failed";
}

TEST_F(RoundsTest, Row40AWorkerThatItsDeviceHasDoneWithoutIsNotFilled) {
  spreading();
  auto discarded = over();
  discarded.bytes = 900;
  discarded.worker_lost = Error(ErrorCode::kTimeout, "it hangs");
  rounds_.spread_over(discarded, now_);
  const auto said = member();
  EXPECT_EQ(said.state(), proto::ROUND_FAILED);
  EXPECT_TRUE(said.worker_lost()) << "its party is none that failed";
  EXPECT_EQ(said.why(), "it hangs");
  EXPECT_EQ(said.spread_bytes(), 900u);
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_FALSE(effects_.left[0].all) << "what it lacks comes from the copy here";
  rounds_.device_over({.session = 1, .error = Error(ErrorCode::kTimeout, "it hangs")}, now_);
  EXPECT_EQ(effects_.left.size(), 1u);
  orders_.clear_rounds();
  obey();
  EXPECT_EQ(member().state(), proto::ROUND_SERVING) << "its session may yet load by itself";
  EXPECT_FALSE(member().worker_lost());
}

TEST_F(RoundsTest, Row39ItsDeviceIsStoppedWithItsParty) {
  spreading();
  rounds_.fail(1, "died (pid 7)", now_);
  party(proto::PARTY_STOPPED);
  obey();
  EXPECT_EQ(effects_.stops.size(), 1u);
  EXPECT_EQ(member().state(), proto::ROUND_FAILED);
  EXPECT_FALSE(member().worker_lost());
}

TEST_F(RoundsTest, Row38ADeviceProcessThatDiesLeavesItsMembersAlone) {
  spreading();
  rounds_.device_over({.session = 1, .error = Error(ErrorCode::kPeerLost, "it died")}, now_);
  EXPECT_EQ(member().state(), proto::ROUND_ALONE);
  EXPECT_EQ(member().why(), "it died");
  ASSERT_EQ(effects_.left.size(), 1u);
  EXPECT_FALSE(effects_.left[0].all);
}

TEST_F(RoundsTest, OneThatFailsBeforeItsPartyBeginsHasFailedForAWhile) {
  gathered();
  rounds_.fail(1, "hangs", now_);
  const auto said = member();
  EXPECT_EQ(said.state(), proto::ROUND_FAILED);
  EXPECT_EQ(said.round(), kRound);
  EXPECT_FALSE(said.worker_lost());
  rounds_.check(now_ + 4999ms);
  EXPECT_TRUE(rounds_.has_members());
  rounds_.check(now_ + 5s);
  EXPECT_FALSE(rounds_.has_members());
}

TEST_F(RoundsTest, AnOlderAnswerThatComesLateChangesNothing) {
  attach(1, 1);
  const auto first = report();
  const auto second = report();
  order();
  orders_.set_revision(7);
  rounds_.obey(orders_, second.sequence(), now_);
  proto::RoundOrders none;
  none.set_revision(6);
  rounds_.obey(none, first.sequence(), now_);
  EXPECT_TRUE(rounds_.known().gathers("m", "g"));
  rounds_.unanswered();
  none.set_revision(1);  // another coordinator
  rounds_.obey(none, report().sequence(), now_);
  EXPECT_FALSE(rounds_.known().gathers("m", "g"));
}

TEST_F(RoundsTest, OrdersForStrangersAndNonsenseDoNothing) {
  gathered();
  party(proto::PARTY_SPREADING, 77);
  auto& broken = *orders_.add_rounds();
  broken.set_round(kRound + 5);
  broken.set_gathering(true);
  obey();
  EXPECT_THAT(effects_.spreads, IsEmpty());
  EXPECT_EQ(rounds_.known().gathers("m", "g"), std::nullopt);
}

TEST_F(RoundsTest, RanksHereWithoutACopyShareOutWhatTheyKeepInTheOrderOfRanks) {
  order();
  obey();
  for (const SessionId session : {1u, 2u, 3u}) {
    attach(session);
    joined(session, session == 2 ? RoundMember::Bytes::kAll : RoundMember::Bytes::kNone);
  }
  obey();
  auto& spread = party(proto::PARTY_SPREADING, 1);
  spread.mutable_members(0)->set_rank(2);
  for (const SessionId session : {2u, 3u}) {
    auto& place = *spread.add_members();
    place.set_session(session);
    place.set_rank(session == 2 ? 0 : 1);
  }
  obey();
  ASSERT_EQ(effects_.spreads.size(), 3u);
  for (const auto& ordered : effects_.spreads) {
    if (ordered.session == 2) {
      EXPECT_EQ(ordered.keep_count, 0u) << "it has all of it";
      continue;
    }
    EXPECT_EQ(ordered.keep_count, 2u);
    EXPECT_EQ(ordered.keep_index, ordered.session == 3 ? 0u : 1u);
  }
}

// Ranks 0 and 2 are here, rank 1 is elsewhere.
TEST_F(RoundsTest, OwnersThatLackTheVersionFetchTheSharesOfAllRanksHere) {
  order();
  obey();
  for (const SessionId session : {1u, 2u}) {
    attach(session);
    joined(session, RoundMember::Bytes::kFetchable);
  }
  obey();
  for (const SessionId session : {1u, 2u}) {
    EXPECT_TRUE(member(session).fetches());
    EXPECT_FALSE(member(session).owner());
  }
  auto& spread = party(proto::PARTY_SPREADING, 1);
  spread.set_ranks(3);
  spread.set_owners_fetch(true);
  spread.clear_owners();
  for (const std::uint32_t owner : {1u, 2u, 0u}) spread.add_owners(owner);
  auto& place = *spread.add_members();
  place.set_session(2);
  place.set_rank(2);
  spread.mutable_members(0)->set_rank(0);
  obey();
  ASSERT_EQ(effects_.spreads.size(), 2u);
  for (const auto& ordered : effects_.spreads) {
    EXPECT_TRUE(ordered.owners_fetch);
    EXPECT_EQ(ordered.ranks_here, 2u) << "the third rank is on another one";
    EXPECT_THAT(ordered.fetched, ElementsAre(1u, 2u));
  }
}

TEST_F(RoundsTest, WhatWasKeptIsReported) {
  spreading();
  auto said = over();
  said.kept_bytes = 321;
  rounds_.spread_over(said, now_);
  EXPECT_EQ(member().kept_bytes(), 321u);
}

}  // namespace
}  // namespace rekindle::worker
