#include "recovery/worker/worker_traces.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <vector>

#include <unistd.h>

#include <gtest/gtest.h>

// The spans that an agent leaves of recoveries.
namespace rekindle::worker {
namespace {

using namespace std::chrono_literals;

class RecoverySpans : public ::testing::Test {
 protected:
  RecoverySpans() {
    event_.kind = "committed";
    event_.instance = "chat";
    event_.rung = std::string(to_string(Rung::kPeers));
    event_.phases = std::array<Duration, kPhaseCount>{};
    event_.trace.span = {trace::TraceId::random(), trace::SpanId::random()};
  }
  const std::string* pull_trace() {
    record_recovery(tracer_, event_, TimePoint(1h));
    spans_ = tracer_.of_trace(event_.trace.span.trace);
    return std::ranges::find(spans_, "recovery", &trace::Span::name)->text(trace::kPullTrace);
  }

  trace::Tracer tracer_{"agent", "a"};
  Event event_;
  std::vector<trace::Span> spans_;
};

TEST_F(RecoverySpans, DoNotNameTheirOwnPull) {
  event_.trace.puller = event_.trace.span;
  EXPECT_EQ(pull_trace(), nullptr);
}

TEST_F(RecoverySpans, NameThePullOfAnotherRankAlsoInTheSameTrace) {
  event_.trace.puller = {event_.trace.span.trace, trace::SpanId::random()};
  ASSERT_NE(pull_trace(), nullptr);
  EXPECT_EQ(*pull_trace(), event_.trace.span.trace.hex());
}

TEST_F(RecoverySpans, NameNoPullWhereTheBytesWereHere) {
  event_.trace.puller = {trace::TraceId::random(), trace::SpanId::random()};
  event_.rung = std::string(to_string(Rung::kLocal));
  EXPECT_EQ(pull_trace(), nullptr);
}

TEST(RestartOfARank, EndsATimeInWhichNobodyWantedIt) {
  EXPECT_TRUE(was_wanted(30s, 100ms)) << "a pause of `rekindle run`";
  EXPECT_TRUE(was_wanted(1h, 2h)) << "its process was there";
  EXPECT_TRUE(was_wanted(1h, std::nullopt));
  EXPECT_FALSE(was_wanted(1h, 100ms));
}

}  // namespace
}  // namespace rekindle::worker
