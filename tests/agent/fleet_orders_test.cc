#include "recovery/agent/core/fleet_orders.h"

#include <gtest/gtest.h>

namespace rekindle::agent {
namespace {

const ModelVersion kOrdered1{"m", 1};
const ModelVersion kOrdered2{"m", 2};
const Digest kRoot{1, 2};

bool has_nothing(const ModelVersion&, const Digest&) { return false; }
bool has_everything(const ModelVersion&, const Digest&) { return true; }

FleetOrders::Answer retire(const ModelVersion& id) {
  FleetOrders::Answer answer;
  answer.retire = {id};
  return answer;
}

FleetOrders::Answer fetch(const std::vector<ModelVersion>& ids, std::uint64_t epoch = 1) {
  FleetOrders::Answer answer;
  answer.epoch = epoch;
  for (const ModelVersion& id : ids) answer.fetch.push_back({id, kRoot, 0});
  return answer;
}

TEST(FleetOrders, ARetirementBeginsOnceAndAgainAfterItsEnd) {
  FleetOrders orders;
  auto actions = orders.take(retire(kOrdered1), has_nothing);
  EXPECT_EQ(actions.retire, std::vector{kOrdered1});
  EXPECT_TRUE(actions.draining.contains(kOrdered1));
  actions = orders.take(retire(kOrdered1), has_nothing);
  EXPECT_TRUE(actions.retire.empty());
  EXPECT_TRUE(actions.draining.contains(kOrdered1));
  orders.retired(kOrdered1);
  EXPECT_EQ(orders.take(retire(kOrdered1), has_nothing).retire, std::vector{kOrdered1});
}

TEST(FleetOrders, AFetchBeginsOnceAndIsReportedWhileItRuns) {
  FleetOrders orders;
  ASSERT_EQ(orders.take(fetch({kOrdered1}), has_nothing).fetch.size(), 1u);
  EXPECT_TRUE(orders.take(fetch({kOrdered1}), has_nothing).fetch.empty());
  EXPECT_EQ(orders.report().fetching.size(), 1u);
  orders.fetched(kOrdered1, true);
  EXPECT_EQ(orders.report().fetching.size(), 0u);
  EXPECT_EQ(orders.report().failed_fetches.size(), 0u);
}

TEST(FleetOrders, AFailureIsReportedUntilAnAnswerComes) {
  FleetOrders orders;
  (void)orders.take(fetch({kOrdered1}), has_nothing);
  orders.fetched(kOrdered1, false);
  EXPECT_EQ(orders.report().failed_fetches.size(), 1u);
  EXPECT_EQ(orders.report().failed_fetches.size(), 1u) << "the answer may have been lost";
  (void)orders.take({}, has_nothing);
  EXPECT_EQ(orders.report().failed_fetches.size(), 0u);
}

TEST(FleetOrders, AFailureThatTheLastHeartbeatDidNotHaveIsKept) {
  FleetOrders orders;
  (void)orders.take(fetch({kOrdered1, kOrdered2}), has_nothing);
  orders.fetched(kOrdered1, false);
  (void)orders.report();
  orders.fetched(kOrdered2, false);
  (void)orders.take({}, has_nothing);
  const auto report = orders.report();
  ASSERT_EQ(report.failed_fetches.size(), 1u);
  EXPECT_EQ(report.failed_fetches.front(), kOrdered2);
}

TEST(FleetOrders, AFetchThatIsNoLongerWantedIsCancelledOnceAndIsNotAFailure) {
  FleetOrders orders;
  (void)orders.take(fetch({kOrdered1, kOrdered2}), has_nothing);
  EXPECT_EQ(orders.take(fetch({kOrdered2}), has_nothing).cancel, std::vector{kOrdered1});
  EXPECT_TRUE(orders.was_cancelled(kOrdered1));
  EXPECT_TRUE(orders.take(fetch({kOrdered2}), has_nothing).cancel.empty());
  EXPECT_EQ(orders.report().fetching.size(), 1u);
  orders.fetched(kOrdered1, false);
  EXPECT_EQ(orders.report().failed_fetches.size(), 0u);
  EXPECT_EQ(orders.take(fetch({kOrdered1, kOrdered2}), has_nothing).fetch.size(), 1u)
      << "wanted again";
}

TEST(FleetOrders, ACoordinatorOfANewEpochCancelsNothingThatItDidNotOrder) {
  FleetOrders orders;
  (void)orders.take(fetch({kOrdered1}, 4), has_nothing);
  EXPECT_TRUE(orders.take(fetch({}, 5), has_nothing).cancel.empty());
  (void)orders.take(fetch({kOrdered1}, 5), has_nothing);
  EXPECT_EQ(orders.take(fetch({}, 5), has_nothing).cancel, std::vector{kOrdered1});
}

TEST(FleetOrders, ACopyThatIsHereAlreadyIsAnnouncedAndNotFetched) {
  FleetOrders orders;
  const auto actions = orders.take(fetch({kOrdered1}), has_everything);
  EXPECT_TRUE(actions.fetch.empty());
  EXPECT_TRUE(actions.announce);
}

TEST(FleetOrders, NothingBeginsAfterAStop) {
  FleetOrders orders;
  orders.stop();
  auto order = fetch({kOrdered1});
  order.retire = {kOrdered2};
  const auto actions = orders.take(order, has_nothing);
  EXPECT_TRUE(actions.fetch.empty());
  EXPECT_TRUE(actions.retire.empty());
  EXPECT_TRUE(actions.draining.contains(kOrdered2));
}

}  // namespace
}  // namespace rekindle::agent
