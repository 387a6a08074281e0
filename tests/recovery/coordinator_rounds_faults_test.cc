#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/rounds_fixture.h"
#include "tests/support/effort.h"
#include "tests/support/numbered_digest.h"

// Broadcast rounds in which something fails: each ends, and the right nodes are told.
namespace rekindle::coordinator {
namespace {

using namespace testing;
using ::testing::HasSubstr;

TEST_F(ThreeWorkers, ThatCannotMakeACommunicatorGoOnAlone) {
  const RoundId number = begin();
  all_join(number);
  reports["b"].ids = {{number, 1, "forged", ""}};
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kMeeting) << "b was not asked";
  reports["a"].ids = {{number, 1, "", "no NCCL here"}};
  ASSERT_TRUE(say("a"));
  EXPECT_EQ(order("c", number).state, PartyState::kStopped);
  EXPECT_THAT(order("c", number).why, HasSubstr("no NCCL here"));
  EXPECT_EQ(round(number).phase(), RoundPhase::kLoading);
}

TEST_F(ThreeWorkers, MeetWithinADeadline) {
  const RoundId number = begin();
  all_join(number);
  pass(9900ms);
  EXPECT_EQ(order("c", number).state, PartyState::kMeeting);
  pass(200ms);
  EXPECT_EQ(order("c", number).state, PartyState::kStopped);
  EXPECT_THAT(order("c", number).why, HasSubstr("rank 0 of ia on a"));
}

TEST_F(ThreeWorkers, Row43AFailedSpreadStopsTheOthers) {
  const RoundId number = spread();
  set("b", RoundMemberState::kAlone);
  member("b").why = "no progress for 5000 ms";
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_EQ(order("a", number).why, "rank 0 of ib on b: no progress for 5000 ms");
  EXPECT_EQ(round(number).phase(), RoundPhase::kLoading);
  everybody(RoundMemberState::kReady);
  EXPECT_TRUE(round(number).over());
  EXPECT_TRUE(place(number, "b").ready()) << "from its host";
}

TEST_F(ThreeWorkers, Row43AStoppedPartysCommunicatorIsNotUsedAgain) {
  const RoundId number = spread();
  const std::string name = round(number).parties()[0].communicator;
  set("b", RoundMemberState::kAlone);
  ASSERT_TRUE(say("b"));
  everybody(RoundMemberState::kReady);
  for (const char* node : {"a", "b", "c"}) member(node).communicators = {name};
  const RoundId next = begin_anew();
  all_join(next);
  EXPECT_NE(order("a", next).communicator, name);
}

TEST_F(ThreeWorkers, Row39AWorkersDeathDisturbsNobodyWhileItsDeviceGoesOn) {
  const RoundId number = spread();
  member("c").worker_lost = true;
  member("c").why = "the worker was killed";
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
  EXPECT_EQ(place(number, "c").why, "the worker was killed");
  set("a", RoundMemberState::kReady);
  set("b", RoundMemberState::kReady);
  say_all();
  EXPECT_EQ(round(number).phase(), RoundPhase::kSpreading) << "its device is not through";
  reports["c"].members.clear();
  say_all();
  EXPECT_TRUE(round(number).over());
  EXPECT_NE(round(number).parties()[0].state, PartyState::kStopped);
}

TEST_F(ThreeWorkers, Row39AWorkerThatDiesBeforeItsDeviceSpreadsStopsTheParty) {
  const RoundId number = begin();
  all_join(number);
  member("c").worker_lost = true;
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
}

TEST_F(ThreeWorkers, Row43ASessionThatEndsStopsTheOthers) {
  const RoundId number = spread();
  reports["c"].members.clear();
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_EQ(place(number, "c").why, "its session has ended");
}

TEST_F(ThreeWorkers, MayEndOnceTheyHaveEverything) {
  const RoundId number = spread();
  set("c", RoundMemberState::kFilled);
  ASSERT_TRUE(say("c"));
  reports["c"].members.clear();
  ASSERT_TRUE(say("c"));
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
  EXPECT_EQ(place(number, "c").why, "its session has ended");
}

TEST_F(ThreeWorkers, Row43AnAgentThatLeavesTheRoundStopsTheOthers) {
  const RoundId number = spread();
  set("b", RoundMemberState::kServing);
  member("b").round = 0;
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_EQ(place(number, "b").state_name(), "failed");
}

TEST_F(ThreeWorkers, Row43ADeviceProcessThatEndsStopsTheOthers) {
  const RoundId number = spread();
  reports["b"].device_life = "another";
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_THAT(order("a", number).why, HasSubstr("device process"));
}

TEST_F(ThreeWorkers, Row43ADeadNodeStopsTheOthersAndEndsTheRound) {
  const RoundId number = spread();
  kill("b");
  silent.insert("b");
  pass(2200ms);
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_THAT(order("a", number).why, HasSubstr("the node died"));
  for (const char* name : {"a", "c"}) set(name, RoundMemberState::kReady);
  pass(100ms);
  EXPECT_TRUE(round(number).over());
  EXPECT_EQ(place(number, "b").why, "the node died");
}

TEST_F(ThreeWorkers, Row43ANodeThatComesBackAfterTheRoundHearsThatItsPartyHasStopped) {
  const RoundId number = spread();
  dead.insert("b");
  silent.insert("b");
  pass(2200ms);
  for (const char* name : {"a", "c"}) set(name, RoundMemberState::kReady);
  pass(100ms);
  ASSERT_TRUE(round(number).over());
  EXPECT_TRUE(rounds.orders_for("a").empty());
  silent.clear();
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("b", number).state, PartyState::kStopped);
  EXPECT_EQ(order("b", number).members.at(0).session, member("b").session);
  set("b", RoundMemberState::kAlone);
  ASSERT_TRUE(say("b"));
  EXPECT_TRUE(rounds.orders_for("b").empty()) << "it has heard it";
}

TEST_F(ThreeWorkers, Row43AnAgentThatStartsAnewStopsTheOthers) {
  const RoundId number = spread();
  add_node("b");
  add_worker("b", "ib");
  ASSERT_TRUE(say("b"));
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
  EXPECT_EQ(place(number, "b").why, "its agent has started anew");
}

TEST_F(ThreeWorkers, Row43ASilentAgentStopsTheOthers) {
  const RoundId number = spread();
  silent.insert("b");
  pass(4900ms);
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
  pass(200ms);
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
}

TEST_F(ThreeWorkers, ThatWaitForAnAnswerAreNotSilent) {
  const RoundId number = spread();
  reports["b"].wait = 5s;
  ASSERT_TRUE(say("b"));
  silent.insert("b");
  pass(9s);
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
}

TEST_F(ThreeWorkers, APartyWithoutProgressIsStopped) {
  const RoundId number = spread();
  pass(29s);
  member("b").spread_bytes = 10;
  pass(29s);
  EXPECT_EQ(order("a", number).state, PartyState::kSpreading);
  pass(2s);
  EXPECT_EQ(order("a", number).state, PartyState::kStopped);
}

TEST_F(ThreeWorkers, HaveUntilADeadlineToBecomeReady) {
  const RoundId number = spread();
  everybody(RoundMemberState::kFilled);
  set("a", RoundMemberState::kReady);
  pass(599s);
  EXPECT_FALSE(round(number).over());
  pass(2s);
  EXPECT_TRUE(round(number).over());
  EXPECT_TRUE(place(number, "a").ready());
  EXPECT_THAT(place(number, "b").why, HasSubstr("has not become ready"));
}

TEST_F(ThreeWorkers, AreHeardOfInOrder) {
  const RoundReport early = reports["a"];
  ASSERT_TRUE(say("a"));
  EXPECT_EQ(rounds.report(early, now).error().code(), ErrorCode::kStale);
}

TEST_F(ThreeWorkers, APauseOfTheCoordinatorCountsAgainstNobody) {
  const RoundId number = begin();
  now += 1h;
  rounds.shift(1h);
  for (const auto& [name, report] : reports) {
    ASSERT_TRUE(members.hear(name, report.incarnation, now));
  }
  rounds.advance(members, now);
  EXPECT_EQ(round(number).phase(), RoundPhase::kGathering);
  EXPECT_FALSE(rounds.orders_for("a").empty());
}

// Rounds in a fleet where anything happens in any order: each seed is one run. The rules are
// checked after each step. Every round must end once nothing happens any more.

constexpr const char* kNodes[] = {"a", "b", "c", "d"};
constexpr const char* kGroups[] = {"g", "h"};

class RandomRounds : protected RoundsWorld {
 public:
  explicit RandomRounds(std::uint64_t seed) : random_(seed) {
    for (const char* name : kNodes) {
      add_node(name);
      const std::uint64_t workers = 1 + pick(3);
      for (std::uint64_t i = 0; i < workers; ++i) new_worker(name);
    }
    say_all();
  }
  void run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) {
      step();
      check();
    }
    settle();
  }
  std::size_t spread() const { return spread_; }
  std::size_t fetched() const { return fetched_; }

 private:
  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  std::string any_node() { return kNodes[pick(std::size(kNodes))]; }
  void new_worker(const std::string& node) {
    add_worker(node, fmt::format("i{}", pick(4)), static_cast<std::uint32_t>(pick(3)),
               fmt::format("double:{}", pick(3)), kGroups[pick(2)]);
  }
  RoundMember* any_member(const std::string& node) {
    auto& list = reports.at(node).members;
    return list.empty() ? nullptr : &list[pick(list.size())];
  }
  void step() {
    const std::string node = any_node();
    switch (pick(16)) {
      case 0:
        (void)rounds.begin(pick(2) == 0 ? kRoundV1 : kRoundV2, kRoot,
                           pick(3) == 0 ? "" : kGroups[pick(2)], {}, 3, now);
        return;
      case 1:
        if (pick(10) == 0) restart(node);
        return;
      case 2:
        if (auto* who = any_member(node)) who->worker_lost = pick(2) == 0;
        break;
      case 3:
        new_worker(node);
        break;
      case 4: {
        auto& list = reports.at(node).members;
        if (!list.empty() && pick(4) == 0) {
          list.erase(list.begin() + static_cast<std::ptrdiff_t>(pick(list.size())));
        }
        break;
      }
      case 5:
        if (pick(8) == 0) reports.at(node).device_life += "+";
        break;
      case 6:
        pass(std::chrono::milliseconds(pick(20) == 0 ? 6000 : 100 * (1 + pick(5))));
        return;
      case 7:
        if (pick(4) == 0) pick(2) == 0 ? (void)silent.insert(node) : silent.clear();
        return;
      default:
        obey(node);
    }
    if (!silent.contains(node)) (void)say(node);
  }
  void restart(const std::string& node) {
    add_node(node);
    new_worker(node);
    (void)say(node);
  }
  // As an agent would, mostly.
  void obey(const std::string& node) {
    for (const RoundOrder& order : rounds.orders_for(node)) {
      auto& list = reports.at(node).members;
      for (std::size_t i = 0; i < list.size(); ++i) {
        const bool wanted = list[i].id.model == order.id.model &&
                            (order.group.empty() || order.group == list[i].group);
        if (!order.gathering || !wanted || list[i].round == order.round || pick(3) == 0) continue;
        // In a third of the rounds no host has all of it, and most hosts fetch.
        const bool nobody_has_it = order.round % 3 == 0;
        join(node, order.round, !nobody_has_it && pick(2) == 0, i);
        member(node, i).fetches = !member(node, i).owner && pick(4) != 0;
        list[i].contents = test::numbered_digest(1 + pick(2), 1);
        if (pick(20) == 0) list[i].root = {8, 8};
      }
      for (const PartyOrder& party : order.parties) obey(node, order, party);
    }
    std::erase_if(reports.at(node).ids, [&](const MeetingId&) { return pick(2) == 0; });
  }
  void obey(const std::string& node, const RoundOrder& order, const PartyOrder& party) {
    if (party.make_id) {
      const bool fails = pick(6) == 0;
      reports.at(node).ids.push_back(
          {order.round, party.party, fails ? "" : "id", fails ? "none" : ""});
    }
    for (const auto& place : party.members) {
      auto& list = reports.at(node).members;
      const auto who = std::ranges::find(list, place.session, &RoundMember::session);
      if (who == list.end()) continue;
      advance(*who, party);
    }
  }
  void advance(RoundMember& who, const PartyOrder& party) {
    using enum RoundMemberState;
    if (party.state == PartyState::kStopped && (who.state == kJoined || who.state == kSpreading)) {
      who.state = kAlone;
    } else if (party.state == PartyState::kSpreading && who.state == kJoined) {
      who.state = kSpreading;
    } else if (who.state == kSpreading) {
      ++spread_;
      who.state = pick(8) == 0 ? kAlone : kFilled;
      if (!party.communicator.empty()) who.communicators = {party.communicator};
    } else if (who.state == kAlone || who.state == kFilled) {
      who.state = pick(10) == 0 ? kFailed : kReady;
    }
  }

  void check() {
    for (const auto& [number, round] : rounds.all()) {
      if (round.over()) continue;
      ASSERT_NO_FATAL_FAILURE(check(round));
    }
    for (const char* node : kNodes) {
      for (const RoundOrder& order : rounds.orders_for(node)) {
        std::set<std::uint64_t> sessions;
        for (const PartyOrder& party : order.parties) {
          for (const auto& place : party.members) {
            EXPECT_TRUE(sessions.insert(place.session).second) << "in two parties";
          }
        }
        check_nobody_waits_in_vain(node, order, sessions);
      }
    }
  }
  void check(const Round& round) {
    std::set<std::size_t> meet;
    for (const Party& party : round.parties()) {
      std::set<std::pair<std::string, std::string>> devices;
      ASSERT_GE(party.ranks.size(), 2u);
      ASSERT_FALSE(party.owners.empty());
      for (std::size_t rank = 0; rank < party.ranks.size(); ++rank) {
        const RoundPlace& place = round.places().at(party.ranks[rank]);
        EXPECT_TRUE(meet.insert(party.ranks[rank]).second) << "in two parties";
        EXPECT_TRUE(devices.emplace(place.node_id, place.device).second) << "a device twice";
        EXPECT_EQ(place.party, party.number);
        EXPECT_EQ(place.party_rank, rank);
        EXPECT_NE(place.state, PlaceState::kLeftOut);
      }
      for (const std::uint32_t owner : party.owners) EXPECT_LT(owner, party.ranks.size());
      if (!party.owners_fetch) continue;
      fetched_ += party.ranks.size();
      EXPECT_EQ(party.owners.size(), party.ranks.size()) << "each of them fetches a share";
    }
    const bool sorted = std::ranges::is_sorted(round.places(), {}, &RoundPlace::node_id);
    EXPECT_TRUE(sorted);
  }
  // After the gathering each member that waits has a running party, or is told why not.
  void check_nobody_waits_in_vain(const std::string& node, const RoundOrder& order,
                                  const std::set<std::uint64_t>& told) {
    if (order.gathering || silent.contains(node)) return;
    for (const RoundMember& member : heard_[node]) {
      const bool waits = member.round == order.round && member.state == RoundMemberState::kJoined;
      EXPECT_TRUE(!waits || told.contains(member.session)) << node << " " << member.session;
    }
  }
  Result<void> say(const std::string& node) override {
    auto said = RoundsWorld::say(node);
    if (said) heard_[node] = reports.at(node).members;
    return said;
  }
  void settle() {
    silent.clear();
    reports.at("a").ids.clear();
    pass(5s + 10s + 30s + 600s + 1s);  // the longest that each phase may take
    for (const auto& [number, round] : rounds.all()) {
      EXPECT_TRUE(round.over()) << number << " is " << to_string(round.phase());
      for (const RoundPlace& place : round.places()) EXPECT_TRUE(place.settled());
    }
  }

  std::mt19937_64 random_;
  std::map<std::string, std::vector<RoundMember>> heard_;
  std::size_t spread_ = 0;
  std::size_t fetched_ = 0;
};

TEST(CoordinatorRoundsRandom, EachRoundEndsAndNobodyIsLeftWaiting) {
  std::size_t spread = 0;
  std::size_t fetched = 0;
  const std::uint64_t runs = rekindle::testing::effort(120);
  for (std::uint64_t seed = 1; seed <= runs; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    RandomRounds world(seed);
    world.run(400);
    spread += world.spread();
    fetched += world.fetched();
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(spread, runs) << "the runs must get as far as to spread";
  EXPECT_GT(fetched, 0u) << "some rounds must have owners that fetch";
}

}  // namespace
}  // namespace rekindle::coordinator
