#include "recovery/coordinator/core/source_standing.h"

#include <gtest/gtest.h>

#include "recovery/coordinator/core/membership.h"

// The standing of sources, and what a node holds, each by itself.
namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kStart{1h};
const ModelVersion kVersion{"m", 1};
constexpr Digest kRoot{1, 7};

Incarnation incarnation(std::uint8_t number) {
  Incarnation result;
  result.bytes.back() = number;
  return result;
}
SourceReport report_on(std::uint8_t source) {
  SourceReport report;
  report.node_id = "n";
  report.incarnation = incarnation(source);
  return report;
}

TEST(SourceReports, EachFactIsNewOncePerPull) {
  SourceReports reports;
  SourceReport report = report_on(1);
  report.lost = report.quarantine = true;
  report.failures = 1;
  report.bytes = 10;
  const auto first = reports.news_in(report);
  EXPECT_TRUE(first.lost && first.quarantined && first.failed && first.delivered);
  reports.keep(report);
  const auto second = reports.news_in(report);
  EXPECT_FALSE(second.lost || second.quarantined || second.failed || second.delivered);
  EXPECT_TRUE(reports.news_in(report_on(2)).lost == false);
}

TEST(SourceReports, AQuarantineIsNotTakenBack) {
  SourceReports reports;
  SourceReport report = report_on(1);
  report.quarantine = true;
  reports.keep(report);
  reports.keep(report_on(1));
  EXPECT_FALSE(reports.news_in(report).quarantined);
  ASSERT_EQ(reports.all().size(), 1u);
  EXPECT_TRUE(reports.all()[0].quarantine);
}

TEST(SourceStanding, AQuarantineDoublesUpToItsMaximum) {
  const Timing timing;
  SourceStanding standing;
  TimePoint now = kStart;
  standing.strike(incarnation(1), "x", timing, now);
  for (const Duration expected : {Duration(10s), Duration(20s), Duration(40s)}) {
    EXPECT_FALSE(standing.quarantined(now));
    standing.strike(incarnation(2), "y", timing, now);
    EXPECT_EQ(standing.quarantined_until(), now + expected);
    now = standing.quarantined_until();
  }
  for (int i = 0; i < 40; ++i) {
    standing.strike(incarnation(1), "x", timing, now);
    standing.strike(incarnation(2), "y", timing, now);
    now = std::max(standing.quarantined_until(), standing.kept_from_until(incarnation(1)));
  }
  standing.strike(incarnation(2), "y", timing, now);
  EXPECT_EQ(standing.quarantined_until(), now + timing.quarantine_max);
}

TEST(SourceStanding, OnePartyAloneQuarantinesNobodyHoweverManyPullersItHas) {
  const Timing timing;
  SourceStanding standing;
  for (std::uint8_t i = 1; i <= 8; ++i) standing.strike(incarnation(i), "liar", timing, kStart);
  EXPECT_FALSE(standing.quarantined(kStart));
  EXPECT_TRUE(standing.struck_by(incarnation(8), kStart)) << "its own pullers do without";
  EXPECT_FALSE(standing.struck_by(incarnation(9), kStart));
  EXPECT_EQ(standing.kept_from_until(incarnation(8)), kStart + timing.quarantine_first);
  standing.strike(incarnation(9), "other", timing, kStart + 1min);
  EXPECT_TRUE(standing.quarantined(kStart + 1min)) << "two parties have found it bad lately";
}

TEST(SourceStanding, AnOldAccusationNeedsAnotherOne) {
  const Timing timing;
  SourceStanding standing;
  standing.strike(incarnation(1), "x", timing, kStart);
  const TimePoint later = kStart + timing.quarantine_max + 1s;
  standing.strike(incarnation(2), "y", timing, later);
  EXPECT_FALSE(standing.quarantined(later));
}

TEST(SourceStanding, RemembersThePullersOfThisQuarantineOnly) {
  const Timing timing;
  SourceStanding standing;
  standing.strike(incarnation(1), "x", timing, kStart);
  standing.strike(incarnation(2), "y", timing, kStart);
  EXPECT_TRUE(standing.struck_by(incarnation(1), kStart));
  EXPECT_FALSE(standing.struck_by(incarnation(3), kStart));
  EXPECT_FALSE(standing.struck_by(incarnation(1), standing.quarantined_until()));
}

Holding shard(std::uint8_t layout, bool verified = true) {
  Holding holding;
  holding.id = kVersion;
  holding.root = kRoot;
  holding.layout = {layout, 9};
  holding.complete = true;
  holding.verified = verified;
  return holding;
}

TEST(Holdings, AWholeCopyIsVerifiedAndOfTheRoot) {
  Holdings holdings;
  holdings.put(shard(1));
  EXPECT_TRUE(holdings.holds(kVersion));
  EXPECT_TRUE(holdings.holds_a_complete_layout(kVersion));
  EXPECT_FALSE(holdings.holds_whole(kVersion, kRoot));
  Holding whole = shard(2, /*verified=*/false);
  whole.whole = true;
  holdings.put(whole);
  EXPECT_FALSE(holdings.holds_whole(kVersion, kRoot));
  whole.verified = true;
  holdings.put(whole);
  EXPECT_TRUE(holdings.holds_whole(kVersion, kRoot));
  EXPECT_FALSE(holdings.holds_whole(kVersion, {2, 7}));
  EXPECT_EQ(std::ranges::distance(holdings.of(kVersion)), 2);
  EXPECT_FALSE(holdings.holds({"m", 2}));
}

TEST(Holdings, APendingOneCountsOnceItsClaimIsDurable) {
  Holdings holdings;
  holdings.put_pending(shard(1));
  EXPECT_FALSE(holdings.holds(kVersion));
  EXPECT_EQ(holdings.size(), 1u);
  const Digest* durable = nullptr;
  const auto root_of = [&](const ModelVersion&) { return durable; };
  holdings.settle_pending(root_of);
  EXPECT_FALSE(holdings.holds(kVersion)) << "its claim is not durable yet";
  durable = &kRoot;
  holdings.settle_pending(root_of);
  EXPECT_TRUE(holdings.holds(kVersion));
}

TEST(Holdings, APendingOneOfAnotherRootIsDropped) {
  Holdings holdings;
  holdings.put_pending(shard(1));
  const Digest other{2, 7};
  holdings.settle_pending([&](const ModelVersion&) { return &other; });
  EXPECT_EQ(holdings.size(), 0u);
}

}  // namespace
}  // namespace rekindle::coordinator
