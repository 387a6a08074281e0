#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "recovery/coordinator/joint_service.h"
#include "recovery/coordinator/round_service.h"
#include "recovery/coordinator/round_wire.h"
#include "recovery/trace/trace_wire.h"
#include "recovery/trace/tracer.h"
#include "tests/recovery/rounds_fixture.h"

// The spans that the coordinator leaves of an update.
namespace rekindle::coordinator {
namespace {

using namespace testing;

class UpdateSpans : public ThreeWorkers {
 protected:
  // A phase, when it began after the start of the round (nullopt: the rank does not know), and how
  // long it took.
  struct Told {
    std::string name;
    std::optional<std::chrono::milliseconds> began;
    std::chrono::milliseconds took;
  };
  void tell(const std::string& node, const std::vector<Told>& phases) {
    for (const Told& told : phases) {
      PhaseTime phase{told.name, static_cast<std::uint64_t>(told.took.count()) * 1000};
      if (told.began) phase.began = start_ + *told.began;
      member(node).phases.push_back(std::move(phase));
    }
  }
  // A round of 3 s whose ranks are ready at its end.
  void run() {
    start_ = now;
    round_ = spread();
    traces_.begin(round_, parent_);
    pass(3s);
    everybody(RoundMemberState::kFilled);
  }
  void end() {
    everybody(RoundMemberState::kReady);
    ASSERT_TRUE(round(round_).over());
    now += 2s;
    traces_.look(rounds, now);
    spans_ = tracer_.of_trace(parent_.trace);
  }
  const trace::Span& rank_on(const std::string& node) const {
    for (const trace::Span& span : spans_) {
      const std::string* const name = span.text(trace::kRank);
      if (name != nullptr && name->ends_with(" on " + node)) return span;
    }
    throw std::out_of_range("no span of a rank on " + node);
  }
  // From the start of the round: the beginning and the end of each phase of the rank on this node.
  using Extents =
      std::map<std::string, std::pair<std::chrono::milliseconds, std::chrono::milliseconds>>;
  Extents phases_on(const std::string& node) const {
    Extents extents;
    for (const trace::Span& span : spans_) {
      if (span.parent == rank_on(node).context.span) extents[span.name] = extent(span);
    }
    return extents;
  }
  std::pair<std::chrono::milliseconds, std::chrono::milliseconds> extent(
      const trace::Span& span) const {
    const auto update = std::ranges::find(spans_, "update", &trace::Span::name);
    using std::chrono::round;
    return {round<std::chrono::milliseconds>(span.start - update->start),
            round<std::chrono::milliseconds>(span.end() - update->start)};
  }

  trace::Tracer tracer_{"coordinator", "coordinator"};
  RoundTraces traces_{&tracer_};
  const trace::Context parent_{trace::TraceId::random(), trace::SpanId::random()};
  TimePoint start_{};
  RoundId round_ = 0;
  std::vector<trace::Span> spans_;
};

TEST_F(UpdateSpans, StandWhereTheRanksSayAndMayOverlap) {
  run();
  tell("a", {{"declare", -200ms, 300ms},
             {"copy", 0ms, 2000ms},
             {"spread", 500ms, 1000ms},
             {"verify", 600ms, 100ms},
             {"apply", 2500ms, 400ms},
             {"resume", 2900ms, 200ms}});
  end();
  const Extents expected{{"declare", {-200ms, 100ms}}, {"copy", {0ms, 2000ms}},
                         {"spread", {500ms, 1500ms}},  {"verify", {600ms, 700ms}},
                         {"apply", {2500ms, 2900ms}},  {"resume", {2900ms, 3100ms}}};
  EXPECT_EQ(phases_on("a"), expected);
  EXPECT_EQ(extent(rank_on("a")), std::pair(-200ms, 3100ms)) << "from its first to its last phase";
  EXPECT_EQ(rank_on("a").text(trace::kPhaseStarts), nullptr);
}

TEST_F(UpdateSpans, OfARankThatDoesNotKnowWhenItsPhasesBeganFollowEachOtherAndAreMarked) {
  run();
  tell("a", {{"copy", std::nullopt, 1000ms}, {"apply", std::nullopt, 500ms}});
  // Its agent knows when the device began to spread, its older worker knows nothing.
  tell("b", {{"copy", std::nullopt, 1000ms}, {"spread", 2000ms, 500ms}});
  end();
  EXPECT_EQ(phases_on("a"), (Extents{{"copy", {0ms, 1000ms}}, {"apply", {1000ms, 1500ms}}}));
  EXPECT_EQ(phases_on("b"), (Extents{{"copy", {0ms, 1000ms}}, {"spread", {1000ms, 1500ms}}}));
  for (const char* node : {"a", "b"}) {
    ASSERT_NE(rank_on(node).text(trace::kPhaseStarts), nullptr) << node;
    EXPECT_EQ(*rank_on(node).text(trace::kPhaseStarts), "unknown");
  }
  EXPECT_EQ(rank_on("c").text(trace::kPhaseStarts), nullptr) << "it has no phases";
  EXPECT_EQ(extent(rank_on("c")), extent(*std::ranges::find(spans_, "update", &trace::Span::name)));
}

TEST_F(UpdateSpans, TakeThePhasesThatComeAfterTheEndWithTheirBeginnings) {
  run();
  tell("a", {{"apply", 2500ms, 500ms}});
  everybody(RoundMemberState::kReady);
  traces_.look(rounds, now);
  EXPECT_TRUE(tracer_.of_trace(parent_.trace).empty()) << "the last phase is awaited";
  tell("a", {{"resume", 3000ms, 250ms}});
  now += 300ms;
  ASSERT_TRUE(say("a"));
  traces_.look(rounds, now);
  spans_ = tracer_.of_trace(parent_.trace);
  EXPECT_EQ(phases_on("a"), (Extents{{"apply", {2500ms, 3000ms}}, {"resume", {3000ms, 3250ms}}}));
}

TEST(RosterSpans, NameManyHostsInFewSpans) {
  trace::Tracer tracer("coordinator", "coordinator");
  JointRoster roster;
  roster.number = 1;
  std::set<std::string> hosts;
  for (int i = 0; i < 300; ++i) {
    NodeInfo info;
    info.node_id = fmt::format("host-{:03}", i);
    info.incarnation = Incarnation::random();
    hosts.insert(info.node_id);
    roster.hosts.push_back({info, {static_cast<std::uint32_t>(i)}});
  }
  record_roster(tracer, kRoundV1, roster);
  const auto spans = tracer.of_trace(tracer.find("publish", "m@1"));
  EXPECT_LE(spans.size(), 8u);
  std::set<std::string> named;
  for (const trace::Span& span : spans) {
    const auto back = trace::from_proto(trace::to_proto(span));
    ASSERT_TRUE(back);
    if (const std::string* const sources = back->text(trace::kSources)) {
      std::istringstream words(*sources);
      for (std::string word; words >> word;) named.insert(word);
    }
  }
  EXPECT_EQ(named, hosts) << "no name is cut on its way";
  // However many there are.
  for (int i = 0; i < 4000; ++i) roster.hosts.push_back(roster.hosts[0]);
  roster.number = 2;
  record_roster(tracer, kRoundV2, roster);
  EXPECT_LE(tracer.of_trace(tracer.find("publish", "m@2")).size(), 33u);
}

TEST(SpansOfUnopenedPulls, Are512AtOnceAnd4ASecondAfterThat) {
  CoordinatorService::Allowance allowance;
  TimePoint now{std::chrono::hours(1)};
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(allowance.take(64, now)) << i;
  EXPECT_FALSE(allowance.take(1, now));
  now += 1s;
  EXPECT_FALSE(allowance.take(5, now)) << "all of them or none";
  EXPECT_TRUE(allowance.take(4, now));
  EXPECT_FALSE(allowance.take(1, now));
  now += 24h;
  EXPECT_TRUE(allowance.take(512, now));
  EXPECT_FALSE(allowance.take(1, now)) << "it does not grow without end";
}

TEST(PhaseOfAReport, BeganSoLongBeforeTheReportCame) {
  proto::RoundReport report;
  report.set_node_id("a");
  report.set_incarnation(std::string(16, 'i'));
  auto& member = *report.add_members();
  member.mutable_id()->set_model("m");
  for (const char* name : {"copy", "apply"}) {
    auto& phase = *member.add_phases();
    phase.set_name(name);
    phase.set_elapsed_us(1000);
  }
  member.mutable_phases(0)->set_ago_us(5'000'000);
  const TimePoint now = TimePoint(std::chrono::hours(1));
  auto read = from_proto(report, now);
  ASSERT_TRUE(read) << read.error().message();
  ASSERT_EQ(read->members[0].phases.size(), 2u);
  EXPECT_EQ(read->members[0].phases[0].began, now - 5s);
  EXPECT_EQ(read->members[0].phases[1].began, std::nullopt);
  // No time that this process can count.
  member.mutable_phases(0)->set_ago_us(~std::uint64_t{0});
  read = from_proto(report, now);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_TRUE(read->members[0].phases.empty());
}

}  // namespace
}  // namespace rekindle::coordinator
