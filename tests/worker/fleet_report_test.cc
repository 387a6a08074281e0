#include "recovery/worker/core/fleet_report.h"

#include <gtest/gtest.h>

namespace rekindle::worker {
namespace {

using namespace std::chrono_literals;
using RankState = RankReport::State;
using Verdict = InstanceVerdict::State;

// Ranks 0 and 1 of three are here, as sessions 10 and 11, and serve m@1.
class FleetReportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (std::uint32_t rank : {0u, 1u}) {
      ASSERT_TRUE(instance_.attach({rank, 3, 0, "m"}, 10 + rank));
    }
    ASSERT_TRUE(instance_.choose(10, std::nullopt));
    ASSERT_TRUE(instance_.chosen(10, {"m", 1}));
    report_.change(1);
  }
  FleetReport::Ruling hear(Verdict state, std::uint64_t term = 1, std::uint64_t version = 1,
                           std::string why = {}) {
    FleetReport::Answers answers;
    answers.change = report_.last_change();
    answers.verdict = InstanceVerdict{{"m", version}, state, std::move(why), term};
    return report_.hear(instance_, answers, now_, 5s);
  }
  void load_both() {
    (void)instance_.loaded(10);
    (void)instance_.loaded(11);
  }

  TimePoint now_{1000s};
  Instance instance_{"i"};
  FleetReport report_;
};

TEST_F(FleetReportTest, ReportsEachRankThatWasHere) {
  (void)instance_.loaded(10);
  (void)instance_.failed(11, "died");
  const auto reports = report_.reports(instance_);
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_EQ(reports[0].state, RankState::kLoaded);
  EXPECT_EQ(reports[0].has, (ModelVersion{"m", 1}));
  EXPECT_EQ(reports[0].version, std::nullopt) << "the newest was asked for";
  EXPECT_EQ(reports[1].state, RankState::kFailed);
  EXPECT_EQ(reports[1].why, "died");
}

TEST_F(FleetReportTest, ReportsNothingBeforeARankKnowsItsVersion) {
  Instance fresh("j");
  ASSERT_TRUE(fresh.attach({0, 2, 0, "m"}, 1));
  EXPECT_TRUE(report_.reports(fresh).empty());
  report_.ask_for(4);
  EXPECT_EQ(report_.reports(fresh).size(), 1u);
}

TEST_F(FleetReportTest, AnInstanceWithoutRanksHereIsReportedUntilAVerdictKnowsIt) {
  (void)instance_.failed(10, "died");
  (void)instance_.failed(11, "died");
  report_.change(2);
  EXPECT_TRUE(report_.is_due(instance_));
  (void)hear(Verdict::kUnfit);
  EXPECT_FALSE(report_.is_due(instance_));
}

TEST_F(FleetReportTest, CommitsTheRanksHereOnTheVerdict) {
  load_both();
  EXPECT_EQ(instance_.state(), InstanceState::kLoading);
  EXPECT_EQ(hear(Verdict::kCommitted).change.commit, (std::vector<SessionId>{10, 11}));
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
}

TEST_F(FleetReportTest, AVerdictOnOlderReportsChangesNothing) {
  load_both();
  FleetReport::Answers answers;
  answers.change = report_.last_change();
  answers.verdict = InstanceVerdict{{"m", 1}, Verdict::kCommitted, "", 1};
  report_.change(2);
  EXPECT_TRUE(report_.hear(instance_, answers, now_, 5s).change.commit.empty());
  EXPECT_EQ(instance_.state(), InstanceState::kLoading);
}

TEST_F(FleetReportTest, ARefusedRankFailsAlone) {
  FleetReport::Answers answers;
  answers.change = report_.last_change();
  answers.refused.emplace(1, Error(ErrorCode::kDenied, "it lives on b"));
  answers.verdict = InstanceVerdict{{"m", 2}, Verdict::kUnfit, "", 1};
  const auto ruling = report_.hear(instance_, answers, now_, 5s);
  ASSERT_EQ(ruling.failed.size(), 1u);
  EXPECT_EQ(ruling.failed[0].first, 11u);
  EXPECT_EQ(ruling.failed[0].second.code(), ErrorCode::kDenied);
}

TEST_F(FleetReportTest, AnotherVersionInTheFleetFailsAllRanksHere) {
  const auto ruling = hear(Verdict::kLoading, 1, 2);
  ASSERT_EQ(ruling.failed.size(), 2u);
  EXPECT_EQ(ruling.failed[0].second.code(), ErrorCode::kStale);
}

TEST_F(FleetReportTest, WithoutAVerdictNothingChanges) {
  load_both();
  (void)hear(Verdict::kCommitted);
  FleetReport::Answers answers;
  answers.change = report_.last_change();
  answers.verdict = Result<InstanceVerdict>(fail(ErrorCode::kUnavailable, "away"));
  EXPECT_TRUE(report_.hear(instance_, answers, now_, 5s).failed.empty());
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
}

TEST_F(FleetReportTest, ANewTermTakesNothingBackBeforeItCanKnow) {
  load_both();
  (void)hear(Verdict::kCommitted, 1);
  (void)hear(Verdict::kLoading, 2);
  now_ += 4s;
  (void)hear(Verdict::kLoading, 2);
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
  now_ += 1s;
  (void)hear(Verdict::kLoading, 2);
  EXPECT_EQ(instance_.state(), InstanceState::kLoading) << "it had time to hear of all ranks";
}

TEST_F(FleetReportTest, ATermThatHasSaidCommittedIsBelievedAtOnce) {
  load_both();
  (void)hear(Verdict::kCommitted, 2);
  (void)hear(Verdict::kLoading, 2);
  EXPECT_EQ(instance_.state(), InstanceState::kLoading);
}

}  // namespace
}  // namespace rekindle::worker
