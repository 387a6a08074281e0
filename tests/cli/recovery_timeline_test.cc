#include "tools/cli/recovery_timeline.h"

#include <gmock/gmock.h>

namespace rekindle::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint32_t kVictim = 70;
constexpr std::uint64_t kDeathUs = 5'000'000;

proto::AgentEvent event(const char* kind, std::uint32_t pid, double after_death_s) {
  proto::AgentEvent made;
  made.set_kind(kind);
  made.set_rank(1);
  made.set_pid(pid);
  made.set_unix_us(kDeathUs + static_cast<std::uint64_t>(after_death_s * 1e6));
  return made;
}

proto::AgentEvent attach(double after_death_s, double process_age_s) {
  auto made = event("attach", 71, after_death_s);
  auto* phase = made.add_phases();
  phase->set_name("start");
  phase->set_elapsed_us(static_cast<std::uint64_t>(process_age_s * 1e6));
  return made;
}

proto::AgentEvent ready(double after_death_s) {
  auto made = event("ready", 0, after_death_s);
  made.clear_rank();
  return made;
}

std::vector<std::string> names(const RecoveryTimeline& timeline) {
  std::vector<std::string> found;
  for (const auto& phase : timeline.phases()) found.push_back(phase.name);
  return found;
}

std::vector<double> times(const RecoveryTimeline& timeline) {
  std::vector<double> found;
  for (const auto& phase : timeline.phases()) found.push_back(phase.took_s);
  return found;
}

using ::testing::DoubleNear;

TEST(RecoveryTimeline, ANewProcessRestartsAndStartsUp) {
  RecoveryTimeline timeline(kVictim, 1);
  timeline.add(event("died", kVictim, 0), 0.5);
  // Several events arrive at once: the agent's clock places them.
  timeline.add(attach(4, 3), 10);
  auto loaded = event("loaded", 71, 6);
  loaded.set_rung("local");
  timeline.add(loaded, 10);
  timeline.add(ready(7), 10);
  EXPECT_TRUE(timeline.ready());
  timeline.first_token(9.5);
  EXPECT_THAT(names(timeline),
              ElementsAre("detect", "restart", "start", "load", "commit", "first_token"));
  EXPECT_THAT(times(timeline),
              ElementsAre(DoubleNear(0.5, 1e-6), DoubleNear(1, 1e-6), DoubleNear(3, 1e-6),
                          DoubleNear(2, 1e-6), DoubleNear(1, 1e-6), DoubleNear(2, 1e-6)));
  EXPECT_THAT(timeline.phases()[3].what, HasSubstr("rung local"));
}

TEST(RecoveryTimeline, AProcessFromBeforeTheDeathTakesOver) {
  RecoveryTimeline timeline(kVictim, 1);
  timeline.add(event("died", kVictim, 0), 0.25);
  timeline.add(attach(0.5, 100), 1);
  EXPECT_THAT(names(timeline), ElementsAre("detect", "takeover"));
  EXPECT_THAT(times(timeline), ElementsAre(DoubleNear(0.25, 1e-6), DoubleNear(0.5, 1e-6)));
}

TEST(RecoveryTimeline, AProcessThatSeemsToStartATickBeforeTheDeathIsANewOne) {
  RecoveryTimeline timeline(kVictim, 1);
  timeline.add(event("died", kVictim, 0), 0.005);
  timeline.add(attach(0.02, 0.03), 1);
  EXPECT_THAT(names(timeline), ElementsAre("detect", "restart", "start"));
  EXPECT_THAT(times(timeline), ElementsAre(DoubleNear(0.005, 1e-6), 0, DoubleNear(0.02, 1e-6)));
}

TEST(RecoveryTimeline, AProcessThatStartsBeforeTheAgentSeesTheDeathIsANewOne) {
  RecoveryTimeline timeline(kVictim, 1);
  timeline.add(event("died", kVictim, 0), 0.5);
  auto late = attach(0.1, 0.4);
  auto* detect = late.add_phases();
  detect->set_name("detect");
  detect->set_elapsed_us(450'000);
  timeline.add(late, 1);
  EXPECT_THAT(names(timeline), ElementsAre("detect", "restart", "start"));
}

TEST(RecoveryTimeline, AnAgentThatDoesNotKnowTheAgeOfAProcessGivesOnePhase) {
  RecoveryTimeline timeline(kVictim, 1);
  timeline.add(event("died", kVictim, 0), 0);
  timeline.add(event("attach", 71, 2), 3);
  EXPECT_THAT(names(timeline), ElementsAre("detect", "restart"));
  EXPECT_THAT(times(timeline), ElementsAre(0, DoubleNear(2, 1e-6)));
}

TEST(RecoveryTimeline, EventsOfOtherWorkersAndOfTheTimeBeforeAreLeftOut) {
  RecoveryTimeline timeline(kVictim, 1);
  timeline.add(ready(0), 0);
  timeline.add(event("died", 69, 0), 0);
  EXPECT_FALSE(timeline.worker_has_ended());
  EXPECT_FALSE(timeline.ready());
  timeline.add(event("died", kVictim, 0), 0);
  auto other = attach(1, 0.5);
  other.set_rank(0);
  timeline.add(other, 1);
  EXPECT_THAT(names(timeline), ElementsAre("detect"));
}

TEST(RecoveryTimeline, AWorkerThatFailsAgainCountsFromItsSuccessor) {
  RecoveryTimeline timeline(kVictim, 1);
  timeline.add(event("died", kVictim, 0), 0);
  timeline.add(attach(1, 0.5), 1);
  timeline.add(event("loaded", 71, 2), 2);
  timeline.add(ready(2.5), 2.5);
  timeline.add(attach(4, 0.5), 4);
  EXPECT_FALSE(timeline.ready());
  EXPECT_THAT(names(timeline), ElementsAre("detect", "restart", "start"));
  EXPECT_THAT(times(timeline), ElementsAre(0, DoubleNear(3.5, 1e-6), DoubleNear(0.5, 1e-6)));
}

}  // namespace
}  // namespace rekindle::cli
