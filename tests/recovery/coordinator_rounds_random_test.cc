#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/recovery/rounds_fixture.h"
#include "tests/support/effort.h"
#include "tests/support/numbered_digest.h"

// Rounds in a fleet where anything happens in any order: each seed is one run. The rules are
// checked after each step. Every round must end once nothing happens any more.
namespace rekindle::coordinator {
namespace {

using namespace testing;

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
        join(node, order.round, pick(2) == 0, i);
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
};

TEST(CoordinatorRoundsRandom, EachRoundEndsAndNobodyIsLeftWaiting) {
  std::size_t spread = 0;
  const std::uint64_t runs = rekindle::testing::effort(120);
  for (std::uint64_t seed = 1; seed <= runs; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    RandomRounds world(seed);
    world.run(400);
    spread += world.spread();
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(spread, runs) << "the runs must get as far as to spread";
}

}  // namespace
}  // namespace rekindle::coordinator
