#include "recovery/agent/core/fleet_orders.h"

#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"

namespace rekindle::agent {
namespace {

const ModelVersion kV1{"m", 1};
const ModelVersion kV2{"m", 2};
const Digest kRoot{1, 2};

bool has_nothing(const ModelVersion&, const Digest&) { return false; }
bool has_everything(const ModelVersion&, const Digest&) { return true; }

proto::HeartbeatResponse retire(const ModelVersion& id) {
  proto::HeartbeatResponse response;
  *response.add_retire() = rpc::to_proto(id);
  return response;
}

proto::HeartbeatResponse fetch(const std::vector<ModelVersion>& ids, std::uint64_t epoch = 1) {
  proto::HeartbeatResponse response;
  response.set_epoch(epoch);
  for (const ModelVersion& id : ids) {
    auto& order = *response.add_fetch();
    *order.mutable_id() = rpc::to_proto(id);
    *order.mutable_root() = rpc::to_proto(kRoot);
  }
  return response;
}

proto::HeartbeatRequest beat(FleetOrders& orders) {
  proto::HeartbeatRequest request;
  orders.fill(request);
  return request;
}

TEST(FleetOrders, ARetirementBeginsOnceAndAgainAfterItsEnd) {
  FleetOrders orders;
  auto actions = orders.take(retire(kV1), has_nothing);
  EXPECT_EQ(actions.retire, std::vector{kV1});
  EXPECT_TRUE(actions.draining.contains(kV1));
  actions = orders.take(retire(kV1), has_nothing);
  EXPECT_TRUE(actions.retire.empty());
  EXPECT_TRUE(actions.draining.contains(kV1));
  orders.retired(kV1);
  EXPECT_EQ(orders.take(retire(kV1), has_nothing).retire, std::vector{kV1});
}

TEST(FleetOrders, AFetchBeginsOnceAndIsReportedWhileItRuns) {
  FleetOrders orders;
  ASSERT_EQ(orders.take(fetch({kV1}), has_nothing).fetch.size(), 1u);
  EXPECT_TRUE(orders.take(fetch({kV1}), has_nothing).fetch.empty());
  EXPECT_EQ(beat(orders).fetching_size(), 1);
  orders.fetched(kV1, true);
  EXPECT_EQ(beat(orders).fetching_size(), 0);
  EXPECT_EQ(beat(orders).failed_fetches_size(), 0);
}

TEST(FleetOrders, AFailureIsReportedUntilAnAnswerComes) {
  FleetOrders orders;
  (void)orders.take(fetch({kV1}), has_nothing);
  orders.fetched(kV1, false);
  EXPECT_EQ(beat(orders).failed_fetches_size(), 1);
  EXPECT_EQ(beat(orders).failed_fetches_size(), 1) << "the answer may have been lost";
  (void)orders.take({}, has_nothing);
  EXPECT_EQ(beat(orders).failed_fetches_size(), 0);
}

TEST(FleetOrders, AFailureThatTheLastHeartbeatDidNotHaveIsKept) {
  FleetOrders orders;
  (void)orders.take(fetch({kV1, kV2}), has_nothing);
  orders.fetched(kV1, false);
  (void)beat(orders);
  orders.fetched(kV2, false);
  (void)orders.take({}, has_nothing);
  const auto request = beat(orders);
  ASSERT_EQ(request.failed_fetches_size(), 1);
  EXPECT_EQ(request.failed_fetches(0).version(), 2u);
}

TEST(FleetOrders, AFetchThatIsNoLongerWantedIsCancelledOnceAndIsNotAFailure) {
  FleetOrders orders;
  (void)orders.take(fetch({kV1, kV2}), has_nothing);
  EXPECT_EQ(orders.take(fetch({kV2}), has_nothing).cancel, std::vector{kV1});
  EXPECT_TRUE(orders.was_cancelled(kV1));
  EXPECT_TRUE(orders.take(fetch({kV2}), has_nothing).cancel.empty());
  EXPECT_EQ(beat(orders).fetching_size(), 1);
  orders.fetched(kV1, false);
  EXPECT_EQ(beat(orders).failed_fetches_size(), 0);
  EXPECT_EQ(orders.take(fetch({kV1, kV2}), has_nothing).fetch.size(), 1u) << "wanted again";
}

TEST(FleetOrders, ACoordinatorOfANewEpochCancelsNothingThatItDidNotOrder) {
  FleetOrders orders;
  (void)orders.take(fetch({kV1}, 4), has_nothing);
  EXPECT_TRUE(orders.take(fetch({}, 5), has_nothing).cancel.empty());
  (void)orders.take(fetch({kV1}, 5), has_nothing);
  EXPECT_EQ(orders.take(fetch({}, 5), has_nothing).cancel, std::vector{kV1});
}

TEST(FleetOrders, ACopyThatIsHereAlreadyIsAnnouncedAndNotFetched) {
  FleetOrders orders;
  const auto actions = orders.take(fetch({kV1}), has_everything);
  EXPECT_TRUE(actions.fetch.empty());
  EXPECT_TRUE(actions.announce);
}

TEST(FleetOrders, NothingBeginsAfterAStop) {
  FleetOrders orders;
  orders.stop();
  auto order = fetch({kV1});
  order.MergeFrom(retire(kV2));
  const auto actions = orders.take(order, has_nothing);
  EXPECT_TRUE(actions.fetch.empty());
  EXPECT_TRUE(actions.retire.empty());
  EXPECT_TRUE(actions.draining.contains(kV2));
}

}  // namespace
}  // namespace rekindle::agent
