#include "recovery/metrics/metrics.h"

#include <gtest/gtest.h>

namespace rekindle::metrics {
namespace {

bool has(const std::string& text, const std::string& line) {
  return ("\n" + text).find("\n" + line + "\n") != std::string::npos;
}

TEST(Metrics, ReadingsAreReadAtEachScrapeAsLongAsTheirOwnerLives) {
  Metrics metrics;
  double value = 1;
  auto added = metrics.add([&](Readings& readings) { readings.gauge("g", "A gauge.", value); });
  EXPECT_TRUE(has(metrics.text(), "g 1")) << metrics.text();
  value = 2;
  EXPECT_TRUE(has(metrics.text(), "g 2")) << metrics.text();
  added.reset();
  EXPECT_EQ(metrics.text().find("\ng "), std::string::npos);
}

TEST(Metrics, HostileLabelsStayOneLabelOfOneLine) {
  Metrics metrics;
  const auto added = metrics.add([](Readings& readings) {
    readings.counter("c_total", "A counter.", 3, {{"name", "a\"} 9\nb\\"}});
  });
  EXPECT_TRUE(has(metrics.text(), R"(c_total{name="a\"} 9\nb\\"} 3)")) << metrics.text();
}

TEST(Metrics, EachStateHasAGaugeAndUnknownStatesHaveNone) {
  Metrics metrics;
  const auto added = metrics.add([](Readings& readings) {
    readings.gauge_by_state("s", "States.", {"up", "down"}, {{"up", 2}, {"evil", 7}});
  });
  const std::string text = metrics.text();
  EXPECT_TRUE(has(text, R"(s{state="up"} 2)")) << text;
  EXPECT_TRUE(has(text, R"(s{state="down"} 0)")) << text;
  EXPECT_EQ(text.find("evil"), std::string::npos);
}

TEST(Metrics, OutcomesAreCountedByTheCodeOfTheirError) {
  Metrics metrics;
  OutcomeCounters outcomes(metrics.counters("o_total", "Outcomes."));
  outcomes.count({});
  outcomes.count({});
  outcomes.count(fail(ErrorCode::kNotFound, "gone"));
  const std::string text = metrics.text();
  EXPECT_TRUE(has(text, R"(o_total{result="ok"} 2)")) << text;
  EXPECT_TRUE(has(text, R"(o_total{result="not_found"} 1)")) << text;
  EXPECT_TRUE(has(text, R"(o_total{result="timeout"} 0)")) << text;
}

TEST(Metrics, DurationsAreSecondsInBuckets) {
  Metrics metrics;
  auto& took = add_seconds(metrics.histograms("d_seconds", "Durations."), {});
  observe(took, std::chrono::milliseconds(1500));
  const std::string text = metrics.text();
  EXPECT_TRUE(has(text, R"(d_seconds_bucket{le="1"} 0)")) << text;
  EXPECT_TRUE(has(text, R"(d_seconds_bucket{le="5"} 1)")) << text;
  EXPECT_TRUE(has(text, "d_seconds_sum 1.5")) << text;
}

}  // namespace
}  // namespace rekindle::metrics
