#pragma once

// An agent's members of broadcast rounds; the coordinator and the sessions are in the test's hands.
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "recovery/worker/rounds.h"

namespace rekindle::worker {

using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace)

inline constexpr std::uint64_t kRound = 100;

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
  void joined(SessionId session = 1, bool owner = false) {
    EXPECT_TRUE(rounds_.enters(session));
    rounds_.hand_over(session, {1, 2}, std::nullopt);
    rounds_.joined({session, 64, {3, 4}, 5000, {"0-7"}}, owner);
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
  Rounds rounds_{effects_};
  proto::RoundOrders orders_;
};

}  // namespace rekindle::worker
