#pragma once

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "recovery/coordinator/core/rounds.h"

namespace rekindle::coordinator::testing {

using namespace std::chrono_literals;

inline const ModelVersion kRoundV1{"m", 1};
inline const ModelVersion kRoundV2{"m", 2};
inline constexpr Digest kRoot{2, 7};
inline constexpr std::uint64_t kPayload = 1000;

// Agents that report to the rounds under virtual time. A node has one worker for each member.
class RoundsWorld {
 public:
  virtual ~RoundsWorld() = default;
  void add_node(const std::string& name) {
    NodeInfo info;
    info.node_id = name;
    const std::uint64_t value = ++incarnations_;
    std::memcpy(info.incarnation.bytes.data() + 8, &value, sizeof value);
    info.control_endpoint = name + ":7400";
    if (members.all().contains(name)) members.all().erase(name);
    EXPECT_TRUE(members.enroll(info, "", "connection of " + name, now));
    RoundReport& report = reports[name];
    report = {};
    report.node_id = name;
    report.incarnation = info.incarnation;
    report.device_life = fmt::format("life {}", value);
  }
  RoundMember& add_worker(const std::string& node, const std::string& instance,
                          std::uint32_t rank = 0, const std::string& device = "double:0",
                          const std::string& group = "g") {
    RoundMember member;
    member.session = ++sessions_;
    member.group = group;
    member.instance = instance;
    member.rank = rank;
    member.id = kRoundV1;
    member.device = device;
    auto& list = reports.at(node).members;
    list.push_back(std::move(member));
    return list.back();
  }
  RoundMember& member(const std::string& node, std::size_t index = 0) {
    return reports.at(node).members.at(index);
  }
  // The worker attaches to the round's version, with a session of its own.
  void join(const std::string& node, RoundId round, bool owner = true, std::size_t index = 0) {
    RoundMember& who = member(node, index);
    who.session = ++sessions_;
    who.id = rounds.find(round)->id();
    who.state = RoundMemberState::kJoined;
    who.round = round;
    who.root = kRoot;
    who.contents = {5, 5};
    who.payload_bytes = kPayload;
    who.bucket_bytes = 64;
    who.owner = owner;
    who.takes_pieces = true;
    who.spread_bytes = 0;
  }
  void set(const std::string& node, RoundMemberState state, std::size_t index = 0) {
    RoundMember& who = member(node, index);
    who.state = state;
    if (state == RoundMemberState::kFilled) who.spread_bytes = kPayload;
  }
  virtual Result<void> say(const std::string& node) {
    RoundReport& report = reports.at(node);
    ++report.sequence;
    return rounds.report(report, now);
  }
  void say_all() {
    for (const auto& [name, report] : reports) {
      if (silent.contains(name)) continue;
      ASSERT_TRUE(say(name));
    }
  }
  // Heartbeats of the living; reports of those that are not silent.
  void pass(Duration duration) {
    for (const TimePoint end = now + duration; now < end;) {
      now += 100ms;
      for (const auto& [name, report] : reports) {
        if (dead.contains(name)) continue;
        EXPECT_TRUE(members.hear(name, report.incarnation, now));
        if (silent.contains(name)) continue;
        EXPECT_TRUE(say(name));
      }
      members.advance(now, {});
      rounds.advance(members, now);
    }
  }
  void kill(const std::string& node) { dead.insert(node); }
  RoundId begin(const std::string& group = "g") {
    const auto begun = rounds.begin(kRoundV2, kRoot, group, {}, 3, now);
    EXPECT_TRUE(begun) << begun.error().message();
    return begun ? *begun : 0;
  }
  // The first rank's device process has made what was asked for.
  void make_id(const std::string& node, RoundId round, std::uint32_t party = 1) {
    reports.at(node).ids = {{round, party, "id-of-" + node, ""}};
    ASSERT_TRUE(say(node));
    reports.at(node).ids.clear();
  }
  const Round& round(RoundId number) const { return *rounds.find(number); }
  // The one order of this node in the round.
  PartyOrder order(const std::string& node, RoundId number) const {
    for (const RoundOrder& order : rounds.orders_for(node)) {
      if (order.round == number && !order.parties.empty()) return order.parties.front();
    }
    ADD_FAILURE() << "no party of " << node << " in round " << number;
    return {};
  }
  const RoundPlace& place(RoundId number, const std::string& node, std::size_t index = 0) const {
    for (const RoundPlace& place : round(number).places()) {
      if (place.node_id == node && index-- == 0) return place;
    }
    throw std::out_of_range("no such place");
  }

  TimePoint now{std::chrono::hours(1)};
  Timing timing;
  Membership members{timing, 1000};
  Rounds rounds;
  std::map<std::string, RoundReport> reports;
  std::set<std::string> silent;
  // Dead nodes are silent. kill() adds them.
  std::set<std::string> dead;

 private:
  std::uint64_t incarnations_ = 0;
  std::uint64_t sessions_ = 0;
};

// Nodes a, b, c, each with a worker of one rank that serves version 1.
class ThreeWorkers : public ::testing::Test, protected RoundsWorld {
 protected:
  void SetUp() override {
    for (const char* name : {"a", "b", "c"}) {
      add_node(name);
      add_worker(name, std::string("i") + name);
    }
    say_all();
  }
  void everybody(RoundMemberState state) {
    for (const char* name : {"a", "b", "c"}) {
      if (!dead.contains(name)) set(name, state);
    }
    for (const char* name : {"a", "b", "c"}) {
      if (dead.contains(name)) continue;
      ASSERT_TRUE(say(name));
    }
  }
  void all_join(RoundId number) {
    for (const char* name : {"a", "b", "c"}) join(name, number, name[0] == 'b');
    say_all();
  }
  // All workers have version 1 (again), and a round to version 2 begins.
  RoundId begin_anew() {
    for (const char* name : {"a", "b", "c"}) {
      set(name, RoundMemberState::kServing);
      member(name).id = kRoundV1;
    }
    say_all();
    return begin();
  }
  RoundId spread() {
    const RoundId number = begin();
    all_join(number);
    make_id("a", number);
    everybody(RoundMemberState::kSpreading);
    EXPECT_EQ(round(number).phase(), RoundPhase::kSpreading);
    return number;
  }
};

}  // namespace rekindle::coordinator::testing
