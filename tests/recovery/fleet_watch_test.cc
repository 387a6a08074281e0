#include "recovery/coordinator/core/fleet_watch.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/coordinator/fleet_json.h"
#include "tests/recovery/coordinator_fixture.h"

namespace rekindle::coordinator::testing {
namespace {

class FleetWatchTest : public ::testing::Test {
 protected:
  // The events since the last call, each as "kind node version".
  std::vector<std::string> news() {
    watch_.look(*world_.core, world_.now, WallTime(std::chrono::seconds(1'700'000'000)));
    std::vector<std::string> lines;
    for (const FleetEvent& event : watch_.log().after(read_, 1000)) {
      std::string line = event.kind;
      if (!event.node_id.empty()) line += " " + event.node_id;
      if (event.id) line += " " + event.id->to_string();
      lines.push_back(std::move(line));
    }
    read_ = watch_.log().last();
    return lines;
  }
  FleetEvent last() const { return watch_.log().after(watch_.log().last() - 1, 1).front(); }
  void close(const PullId& pull, const NodeInfo& puller, const std::string& why) {
    watch_.pull_closes(*world_.core, pull, puller.incarnation, why, world_.now, WallTime());
    world_.close(pull);
  }

  CoreWorld world_;
  FleetWatch watch_{Incarnation()};
  std::uint64_t read_ = 0;
};

using Lines = std::vector<std::string>;

TEST_F(FleetWatchTest, AFleetAtRestHasNoEvents) {
  EXPECT_EQ(news(), Lines{"coordinator_leads"});
  const NodeInfo a = world_.holder("a", kV1);
  EXPECT_EQ(news(), (Lines{"node_joined a", "version_published qwen3@1", "version_ready qwen3@1"}));
  world_.pass(5s, {a});
  EXPECT_EQ(news(), Lines{});
}

TEST_F(FleetWatchTest, AHostThatFallsSilentDiesAndComesBack) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.holder("b", kV1);
  world_.pass(3s, {a, b});
  (void)news();
  world_.pass(1s, {b});
  EXPECT_EQ(news(), Lines{"node_suspect a"});
  world_.pass(3s, {b});
  EXPECT_EQ(news(), Lines{"node_dead a"});
  ASSERT_TRUE(world_.enroll(a));
  EXPECT_EQ(news(), Lines{"node_back a"});
}

TEST_F(FleetWatchTest, AnotherProcessOfAHostIsTold) {
  const NodeInfo a = world_.holder("a", kV1);
  (void)news();
  world_.disconnect(a);
  ASSERT_TRUE(world_.enroll(world_.node("a")));
  const Lines told = news();
  EXPECT_EQ(std::ranges::count(told, "node_back a"), 1) << told.size();
}

TEST_F(FleetWatchTest, APullIsToldWithItsResult) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.node("b");
  ASSERT_TRUE(world_.enroll(b));
  world_.pass(3s, {a, b});
  (void)news();
  auto opened = world_.open(b, "qwen3");
  ASSERT_TRUE(opened);
  EXPECT_EQ(news(), Lines{"pull_opened b qwen3@1"});
  ASSERT_TRUE(world_.progress(b, *opened, {}, 400));
  world_.now += 2s;
  close(opened->pull_id, b, "");
  EXPECT_EQ(news(), Lines{"pull_done b qwen3@1"});
  EXPECT_EQ(last().bytes, 1000u);
  EXPECT_EQ(last().elapsed_us, 2'000'000u);
  // One that nobody looked at while it ran.
  opened = world_.open(b, "qwen3");
  ASSERT_TRUE(opened);
  close(opened->pull_id, b, "no space left");
  EXPECT_EQ(news(), (Lines{"pull_opened b qwen3@1", "pull_failed b qwen3@1"}));
  EXPECT_EQ(last().why, "no space left");
}

TEST_F(FleetWatchTest, AnotherProcessCannotEndAPull) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.node("b");
  ASSERT_TRUE(world_.enroll(b));
  const auto opened = world_.open(b, "qwen3");
  ASSERT_TRUE(opened);
  (void)news();
  watch_.pull_closes(*world_.core, opened->pull_id, a.incarnation, "", world_.now, WallTime());
  EXPECT_EQ(news(), Lines{});
}

TEST_F(FleetWatchTest, APullThatIsNotReportedAnyMoreIsLost) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.node("b");
  ASSERT_TRUE(world_.enroll(b));
  ASSERT_TRUE(world_.open(b, "qwen3"));
  (void)news();
  world_.pass(11s, {a, b});
  EXPECT_EQ(news(), Lines{"pull_lost b qwen3@1"});
}

TEST_F(FleetWatchTest, AVersionIsRetiringUntilNobodyHoldsIt) {
  const NodeInfo a = world_.holder("a", kV1);
  (void)news();
  ASSERT_TRUE(world_.core->retire(kV1, world_.now));
  EXPECT_EQ(news(), Lines{"version_retiring qwen3@1"});
  EXPECT_EQ(news(), Lines{});
  ASSERT_TRUE(world_.announce(a, {}, /*full=*/true));
  EXPECT_EQ(news(), Lines{"version_retired qwen3@1"});
}

TEST_F(FleetWatchTest, CoverageIsLookedAtOnceASecond) {
  const NodeInfo a = world_.holder("a", kV1);
  const NodeInfo b = world_.node("b");
  ASSERT_TRUE(world_.enroll(b));
  world_.pass(3s, {a, b});
  (void)news();
  ASSERT_TRUE(world_.announce(a, {}, /*full=*/true));
  world_.pass(900ms, {a, b});
  EXPECT_EQ(news(), Lines{});
  world_.pass(100ms, {a, b});
  EXPECT_EQ(news(), Lines{"version_not_ready qwen3@1"});
}

TEST_F(FleetWatchTest, AVersionThatBecomesReadyIsToldAtOnce) {
  const NodeInfo a = world_.node("a");
  ASSERT_TRUE(world_.enroll(a));
  const Holding whole = CoreWorld::holding(kV1);
  ASSERT_TRUE(world_.core->publish("", {}, kV1, whole.root, whole.tensor_set, 1000, world_.now));
  (void)news();
  ASSERT_TRUE(world_.announce(a, {CoreWorld::holding(kV1)}));
  EXPECT_EQ(news(), Lines{"version_ready qwen3@1"});
}

TEST_F(FleetWatchTest, AnAgentsEventCountsOnceAndANewProcessCountsAnew) {
  const NodeInfo a = world_.holder("a", kV1);
  (void)news();
  const auto events = [](std::uint64_t from, std::uint64_t to) {
    std::vector<FleetEvent> told;
    for (std::uint64_t i = from; i <= to; ++i) {
      told.push_back({.kind = "committed", .node_id = "another", .number = i});
    }
    return told;
  };
  watch_.told("a", a.incarnation, events(1, 2));
  watch_.told("a", a.incarnation, events(1, 3));
  EXPECT_EQ(news(), (Lines{"committed a", "committed a", "committed a"}));
  watch_.told("a", Incarnation::random(), events(1, 1));
  EXPECT_EQ(news(), Lines{"committed a"});
}

TEST_F(FleetWatchTest, TheLogIsBounded) {
  for (std::uint64_t i = 1; i <= 2 * FleetWatch::kMost; ++i) {
    watch_.told("a", Incarnation{}, {{.kind = "attach", .number = i}});
  }
  EXPECT_EQ(watch_.log().after(0, 10'000).size(), FleetWatch::kMost);
  EXPECT_EQ(watch_.log().last(), 2 * FleetWatch::kMost);
}

TEST(EventsOfAHeartbeat, AreBoundedAndCutBetweenCharacters) {
  proto::HeartbeatRequest request;
  for (int i = 0; i < 64; ++i) request.add_events()->set_number(1);
  std::string text(511, 'x');
  text += "\u00e9\u00e9";
  auto& event = *request.mutable_events(0);
  event.set_why(text);
  event.set_unix_us(~std::uint64_t{0});
  for (int i = 0; i < 100; ++i) event.add_phases()->set_name("p");
  const auto events = events_from(request);
  ASSERT_TRUE(events);
  EXPECT_EQ(events->front().why, std::string(511, 'x'));
  EXPECT_EQ(events->front().phases.size(), 16u);
  EXPECT_GT(events->front().at, WallTime());
  request.mutable_events(1)->mutable_id()->set_model("no such/name @");
  EXPECT_EQ(events_from(request)->size(), 63u);
  request.add_events();
  EXPECT_FALSE(events_from(request));
}

TEST(HaveMap, SaysHowMuchOfEachPartIsThere) {
  EXPECT_EQ(have_map({}, 100, 4), "0000");
  EXPECT_EQ(have_map({{0, 100}}, 100, 4), "9999");
  EXPECT_EQ(have_map({{0, 25}, {50, 51}}, 100, 4), "9010");
  EXPECT_EQ(have_map({{1, 2}}, 3, 256), "090");
  EXPECT_EQ(have_map({}, 0, 256), "");
}

TEST(FleetJson, AFleetAtRestHasTheSameAnswer) {
  CoreWorld world;
  FleetWatch watch{Incarnation()};
  const NodeInfo a = world.holder("a", kV1);
  const auto answer = [&] {
    watch.look(*world.core, world.now, WallTime());
    return fleet_json(*world.core, watch, {world.now, WallTime(world.now.time_since_epoch())});
  };
  world.pass(3s, {a});
  const std::string before = answer();
  world.pass(7s, {a});
  EXPECT_EQ(answer(), before);
}

TEST(FleetJson, FiguresAreOfAllPullsAndInstances) {
  Limits limits;
  limits.max_pullers_per_source = 1000;
  CoreWorld world(limits);
  const FleetWatch watch{Incarnation()};
  const NodeInfo a = world.holder("a", kV1);
  world.pass(3s, {a});
  for (int i = 0; i < 150; ++i) {
    const NodeInfo puller = world.node(fmt::format("p{}", i));
    ASSERT_TRUE(world.enroll(puller));
    ASSERT_TRUE(world.open(puller, "qwen3"));
  }
  for (int i = 0; i < 600; ++i) {
    RankReport rank;
    rank.node_id = a.node_id;
    rank.incarnation = a.incarnation;
    rank.instance = fmt::format("i{}", i);
    rank.model = "qwen3";
    rank.sequence = 1;
    ASSERT_TRUE(world.core->report_rank(rank, world.now));
    rank.sequence = 2;
    rank.has = kV1;
    rank.state = RankState::kLoaded;
    ASSERT_TRUE(world.core->report_rank(rank, world.now));
  }
  const auto answer =
      nlohmann::json::parse(fleet_json(*world.core, watch, {world.now, WallTime()}));
  EXPECT_EQ(answer["pulls"].size(), 100u);
  EXPECT_EQ(answer["pulls_total"], 150);
  EXPECT_EQ(answer["instances"].size(), 500u);
  EXPECT_EQ(answer["instances_total"], 600);
  EXPECT_EQ(answer["instances_committed"], 600);
  EXPECT_EQ(answer["instances_unfit"], 0);
  EXPECT_EQ(std::ranges::count_if(answer["nodes"],
                                  [](const auto& node) { return node.value("pulls", 0) == 1; }),
            150);
}

TEST(FleetJson, BytesThatAreNotTextDoNotBreakTheAnswer) {
  CoreWorld world;
  FleetWatch watch{Incarnation()};
  (void)world.holder("\xff\xfe<b>", kV1);
  const std::string answer = fleet_json(*world.core, watch, {world.now, WallTime()});
  EXPECT_NE(answer.find("\xef\xbf\xbd<b>"), std::string::npos) << answer;
}

}  // namespace
}  // namespace rekindle::coordinator::testing
