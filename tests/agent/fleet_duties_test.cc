#include "recovery/agent/fleet_duties.h"

#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "recovery/agent/core/fleet_orders.h"
#include "recovery/rpc/convert.h"
#include "src/async/task.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;
using async::Task;

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

const ModelVersion kV1{"m", 1};
const ModelVersion kV2{"m", 2};

class Duties : public ::testing::Test {
 protected:
  FleetDuties::Hooks hooks() {
    FleetDuties::Hooks hooks;
    hooks.free_bytes = [] { return std::uint64_t{77}; };
    hooks.readers = [this](const ModelVersion&) { return readers_; };
    hooks.retire = [this](ModelVersion) -> Task<Result<void>> {
      ++retired_;
      co_await async::sleep_for(20ms);
      co_return Result<void>();
    };
    hooks.fetch = [this](ModelVersion) -> Task<Result<void>> {
      ++fetched_;
      // Runs until it is cancelled, or let through.
      while (!let_through_) {
        const bool cancelled = co_await async::is_cancelled();
        if (cancelled) co_return fail(ErrorCode::kUnavailable, "cancelled");
        co_await async::sleep_for(2ms);
      }
      co_return fail(ErrorCode::kExhausted, "no room");
    };
    hooks.announce_soon = [this] { ++announced_; };
    return hooks;
  }
  proto::HeartbeatRequest beat() {
    proto::HeartbeatRequest request;
    duties_.fill(request);
    return request;
  }
  static proto::HeartbeatResponse answer(const std::vector<ModelVersion>& retiring,
                                         const std::vector<ModelVersion>& retire = {}) {
    proto::HeartbeatResponse response;
    for (const auto& id : retiring) *response.add_retiring() = rpc::to_proto(id);
    for (const auto& id : retire) *response.add_retire() = rpc::to_proto(id);
    return response;
  }
  static proto::HeartbeatResponse fetch_of(const ModelVersion& id) {
    proto::HeartbeatResponse response;
    auto& fetch = *response.add_fetch();
    *fetch.mutable_id() = rpc::to_proto(id);
    *fetch.mutable_root() = rpc::to_proto(Digest{1, 2});
    return response;
  }
  static proto::HeartbeatResponse fetch_of_both() {
    proto::HeartbeatResponse response = fetch_of(kV1);
    response.MergeFrom(fetch_of(kV2));
    return response;
  }

  rpc::testing::Loop loop_;
  transport::SegmentRegistry registry_;
  ServedVersions served_{registry_};
  std::uint32_t readers_ = 2;
  int retired_ = 0;
  int fetched_ = 0;
  int announced_ = 0;
  bool let_through_ = false;
  FleetDuties duties_{loop_.executor(), served_, hooks()};
};

TEST_F(Duties, ReadersAreSaidOfTheVersionsThatAreToBeLetGo) {
  EXPECT_EQ(beat().readers_size(), 0);
  EXPECT_EQ(beat().store_free_bytes(), 77u);
  duties_.obey(answer({kV1}));
  EXPECT_TRUE(served_.draining().contains(kV1)) << "nobody new reads it";
  const auto said = beat();
  ASSERT_EQ(said.readers_size(), 1);
  EXPECT_EQ(said.readers(0).id().version(), 1u);
  EXPECT_EQ(said.readers(0).readers(), 2u);
  duties_.obey(answer({kV2}));
  EXPECT_FALSE(served_.draining().contains(kV1)) << "it was published again";
}

class DutiesWithEvents : public Duties {
 protected:
  DutiesWithEvents() {
    duties_.tell_events([this](std::uint64_t after, std::size_t most) {
      std::vector<proto::FleetEvent> events;
      for (std::uint64_t i = after + 1; i <= last_ && events.size() < most; ++i) {
        events.emplace_back().set_number(i);
      }
      return events;
    });
  }
  // The first event of the next heartbeat; 0: it has none.
  std::uint64_t told_next() {
    const auto request = beat();
    return request.events_size() == 0 ? 0 : request.events(0).number();
  }

  std::uint64_t last_ = 100;
};

TEST_F(DutiesWithEvents, EventsAreToldUntilAHeartbeatIsAnswered) {
  EXPECT_EQ(beat().events_size(), 64);
  EXPECT_EQ(told_next(), 1u) << "the answer to the last one may be lost";
  duties_.obey({});
  EXPECT_EQ(told_next(), 65u);
  duties_.obey({});
  EXPECT_EQ(told_next(), 0u);
  last_ = 101;
  EXPECT_EQ(told_next(), 101u);
}

TEST_F(DutiesWithEvents, ANewCoordinatorHearsTheNewestOldEventsBeforeTheNewOne) {
  const Incarnation first = Incarnation::random();
  duties_.registered(first);
  for (int i = 0; i < 2; ++i) {
    (void)beat();
    duties_.obey({});
  }
  ASSERT_EQ(told_next(), 0u);
  // One happens while nobody leads.
  last_ = 101;
  duties_.registered(Incarnation::random());
  EXPECT_EQ(told_next(), 37u) << "64 of the 100 that were told";
  duties_.obey({});
  EXPECT_EQ(told_next(), 101u);
}

TEST_F(DutiesWithEvents, ACoordinatorThatRegistersTheAgentAgainHearsOnlyWhatIsNew) {
  const Incarnation term = Incarnation::random();
  duties_.registered(term);
  (void)beat();
  duties_.obey({});
  duties_.registered(term);
  EXPECT_EQ(told_next(), 65u);
}

TEST_F(Duties, AVersionIsLetGoOnceThoughItIsToldWithEachHeartbeat) {
  for (int i = 0; i < 3; ++i) duties_.obey(answer({}, {kV1}));
  loop_.run_until([&] { return announced_ > 0; });
  EXPECT_EQ(retired_, 1);
}

TEST_F(Duties, AFetchRunsOnceAndItsFailureIsSaidUntilItWasHeard) {
  for (int i = 0; i < 3; ++i) duties_.obey(fetch_of(kV1));
  loop_.run_until([&] { return fetched_ > 0; });
  let_through_ = true;
  loop_.run_until([&] { return beat().failed_fetches_size() > 0; });
  EXPECT_EQ(fetched_, 1);
  EXPECT_EQ(beat().failed_fetches_size(), 1) << "the answer to the last one may be lost";
  duties_.obey(answer({}));
  EXPECT_EQ(beat().failed_fetches_size(), 0);
}

TEST_F(Duties, AFetchThatIsNotWantedAnyMoreIsCancelledAndIsNoFailure) {
  duties_.obey(fetch_of_both());
  loop_.run_until([&] { return fetched_ == 2; });
  EXPECT_EQ(beat().fetching_size(), 2);
  duties_.obey(fetch_of(kV2));
  ASSERT_EQ(beat().fetching_size(), 1);
  EXPECT_EQ(beat().fetching(0).version(), 2u);
  // Once it has ended it may be asked for again.
  loop_.run_until([&] {
    duties_.obey(fetch_of_both());
    return fetched_ == 3;
  });
  EXPECT_EQ(beat().failed_fetches_size(), 0);
}

TEST_F(Duties, ACoordinatorThatHasJustStartedCancelsNoFetch) {
  auto wanted = fetch_of(kV1);
  wanted.set_epoch(4);
  duties_.obey(wanted);
  loop_.run_until([&] { return fetched_ == 1; });
  proto::HeartbeatResponse fresh;
  fresh.set_epoch(5);
  duties_.obey(fresh);
  EXPECT_EQ(beat().fetching_size(), 1);
}

TEST_F(Duties, StoppingCancelsWhatRunsAndWaitsForIt) {
  duties_.obey(fetch_of_both());
  loop_.run_until([&] { return fetched_ == 2; });
  loop_.run(duties_.stop(10s));
  EXPECT_EQ(beat().failed_fetches_size(), 2);
  duties_.obey(fetch_of(kV1));
  EXPECT_EQ(fetched_, 2) << "nothing begins any more";
}

}  // namespace
}  // namespace rekindle::agent
