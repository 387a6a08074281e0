// Buckets that are taken before their targets are known.
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/device_fleet.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kAll = 1ull << 30;

Outcome prefetch(const Session& session, std::uint64_t bytes,
                 std::int64_t timeout_ms = kPatienceMs) {
  return outcome_of(
      [&](rk_error* error) { return rk_prefetch(session.handle, bytes, timeout_ms, error); });
}

TEST(Prefetch, FillingGoesOnBeforeAnyTargetIsKnown) {
  DeviceWorker worker({.slots = 2});
  EXPECT_EQ(prefetch(worker.session, kAll).message, "");
  EXPECT_GT(worker.producer().filled(), 30u) << "two of them fit its slots";
  EXPECT_FALSE(worker.producer().outcome()) << "it has been given everything back";
  EXPECT_EQ(rk_loaded(worker.session.handle, nullptr), RK_INVALID) << "nobody has them";
  expect_loads(worker.session, worker.model);
  EXPECT_EQ(rk_loaded(worker.session.handle, nullptr), RK_OK);
  EXPECT_EQ(prefetch(worker.session, kAll).code, RK_OK) << "there are no more";
}

TEST(Prefetch, ItIsHandedOutFirstAndOnce) {
  DeviceWorker worker({});
  EXPECT_EQ(prefetch(worker.session, 10 * kBucket).message, "");
  EXPECT_EQ(prefetch(worker.session, 20 * kBucket).message, "");
  Collected all(worker.session);
  EXPECT_GT(all.add_all(), 30u);
  all.expect_whole(worker.model);
  EXPECT_FALSE(worker.producer().outcome());
}

TEST(Prefetch, NoMoreThanItMay) {
  DeviceWorker worker({.slots = 2});
  EXPECT_EQ(prefetch(worker.session, 5 * kBucket).message, "");
  EXPECT_LE(worker.producer().filled(), 5u + 1 + 2)
      << "one more is looked at, two are in its slots";
  EXPECT_EQ(prefetch(worker.session, 0).message, "");
  expect_loads(worker.session, worker.model);
}

TEST(Prefetch, LessThanABucketIsNone) {
  DeviceWorker worker({.slots = 1});
  EXPECT_EQ(prefetch(worker.session, 1).message, "");
  EXPECT_EQ(worker.producer().filled(), 1u);
  Collected all(worker.session);
  all.add_all();
  all.expect_whole(worker.model);
}

TEST(Prefetch, OfUploadsAsWell) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.send(attached_for(agent, model, false), model.segments());
    agent.send(model.ready(kSession, 0, model.tiles().tile_count()));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  EXPECT_EQ(prefetch(session, kAll).message, "");
  expect_loads(session, model);
}

TEST(Prefetch, ItGivesWayToWhoWantsBuckets) {
  const FakeModel model;
  Gate rest;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.send(attached_for(agent, model, false), model.segments());
    agent.answer_pings_until(rest);
    agent.send(model.ready(kSession, 0, model.tiles().tile_count()));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Parameters own(session);
  Gate begun;
  std::thread prefetching([&] {
    begun.open();
    EXPECT_EQ(prefetch(session, kAll).message, "") << "it waits for tiles, and then gives way";
  });
  begun.wait();
  // The call is inside the library now.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_THAT(load_into(session, own.targets(), 100).message, HasSubstr("no further bucket"));
  // There is nothing left that it could take.
  prefetching.join();
  rest.open();
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
}

TEST(Prefetch, ABucketThatIsStillReadKeepsItOut) {
  DeviceWorker worker({.slots = 2});
  Collected all(worker.session);
  const Parts first = next_bucket(worker.session);
  EXPECT_EQ(prefetch(worker.session, kAll).message, "");
  // The bytes are still there.
  all.add(first.parts);
  all.add_all();
  all.expect_whole(worker.model);
}

TEST(Prefetch, ADeviceProcessThatDiesIsTold) {
  DeviceWorker worker({.dies_after = 7});
  const Outcome outcome = prefetch(worker.session, kAll);
  EXPECT_EQ(outcome.code, RK_UNAVAILABLE);
  EXPECT_THAT(outcome.message, HasSubstr("the device process"));
  Parameters own(worker.session);
  EXPECT_EQ(load_into(worker.session, own.targets()).code, RK_UNAVAILABLE);
}

TEST(Prefetch, PartsThatDoNotFitAreStillRefused) {
  DeviceWorker worker({.spoils_parts = true});
  EXPECT_EQ(prefetch(worker.session, kAll).message, "") << "nobody has looked at them";
  Parameters own(worker.session);
  const Outcome outcome = load_into(worker.session, own.targets());
  EXPECT_EQ(outcome.code, RK_INTERNAL);
  EXPECT_THAT(outcome.message, HasSubstr("do not fit"));
}

TEST(Prefetch, ASessionMayEndWithWhatNobodyTook) {
  DeviceWorker worker({});
  EXPECT_EQ(prefetch(worker.session, 10 * kBucket).message, "");
  rk_detach(std::exchange(worker.session.handle, nullptr));
  EXPECT_TRUE(worker.producer().outcome()) << "the other side has ended, too";
}

TEST(Prefetch, OnlyOnADevice) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(proto::WorkerFrame::kAttach);
    agent.send(model.attached(call.call(), kSession, true), model.segments());
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const Outcome outcome = prefetch(session, kAll);
  EXPECT_EQ(outcome.code, RK_INVALID);
  EXPECT_THAT(outcome.message, HasSubstr("without a device"));
  EXPECT_EQ(prefetch(session, kAll, -1).code, RK_INVALID);
}

}  // namespace
}  // namespace rekindle::client::testing
