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
  rk_error error{};
  const std::int32_t code = rk_prefetch(session.handle, bytes, timeout_ms, &error);
  return {code, error.message};
}

TEST(Prefetch, FillingGoesOnBeforeAnyTargetIsKnown) {
  const FakeModel model;
  Fleet fleet(model, {.slots = 2});
  const Session session = attach_device(fleet.agent());
  EXPECT_EQ(prefetch(session, kAll).message, "");
  EXPECT_GT(fleet.producer().filled(), 30u) << "two of them fit its slots";
  EXPECT_FALSE(fleet.producer().outcome()) << "it has been given everything back";
  EXPECT_EQ(rk_loaded(session.handle, nullptr), RK_INVALID) << "nobody has them";
  Parameters own(session);
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
  EXPECT_EQ(rk_loaded(session.handle, nullptr), RK_OK);
  EXPECT_EQ(prefetch(session, kAll).code, RK_OK) << "there are no more";
}

TEST(Prefetch, ItIsHandedOutFirstAndOnce) {
  const FakeModel model;
  Fleet fleet(model, {});
  const Session session = attach_device(fleet.agent());
  EXPECT_EQ(prefetch(session, 10 * kBucket).message, "");
  EXPECT_EQ(prefetch(session, 20 * kBucket).message, "");
  Collected all(session);
  EXPECT_GT(all.add_all(), 30u);
  all.expect_whole(model);
  EXPECT_FALSE(fleet.producer().outcome());
}

TEST(Prefetch, NoMoreThanItMay) {
  const FakeModel model;
  Fleet fleet(model, {.slots = 2});
  const Session session = attach_device(fleet.agent());
  EXPECT_EQ(prefetch(session, 5 * kBucket).message, "");
  EXPECT_LE(fleet.producer().filled(), 5u + 1 + 2) << "one more is looked at, two are in its slots";
  EXPECT_EQ(prefetch(session, 0).message, "");
  Parameters own(session);
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
}

TEST(Prefetch, LessThanABucketIsNone) {
  const FakeModel model;
  Fleet fleet(model, {.slots = 1});
  const Session session = attach_device(fleet.agent());
  EXPECT_EQ(prefetch(session, 1).message, "");
  EXPECT_EQ(fleet.producer().filled(), 1u);
  Collected all(session);
  all.add_all();
  all.expect_whole(model);
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
  Parameters own(session);
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
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
  const FakeModel model;
  Fleet fleet(model, {.slots = 2});
  const Session session = attach_device(fleet.agent());
  Collected all(session);
  const Parts first = next_bucket(session);
  EXPECT_EQ(prefetch(session, kAll).message, "");
  // The bytes are still there.
  all.add(first.parts);
  all.add_all();
  all.expect_whole(model);
}

TEST(Prefetch, ADeviceProcessThatDiesIsTold) {
  const FakeModel model;
  Fleet fleet(model, {.dies_after = 7});
  const Session session = attach_device(fleet.agent());
  const Outcome outcome = prefetch(session, kAll);
  EXPECT_EQ(outcome.code, RK_UNAVAILABLE);
  EXPECT_THAT(outcome.message, HasSubstr("the device process"));
  Parameters own(session);
  EXPECT_EQ(load_into(session, own.targets()).code, RK_UNAVAILABLE);
}

TEST(Prefetch, PartsThatDoNotFitAreStillRefused) {
  const FakeModel model;
  Fleet fleet(model, {.spoils_parts = true});
  const Session session = attach_device(fleet.agent());
  EXPECT_EQ(prefetch(session, kAll).message, "") << "nobody has looked at them";
  Parameters own(session);
  const Outcome outcome = load_into(session, own.targets());
  EXPECT_EQ(outcome.code, RK_INTERNAL);
  EXPECT_THAT(outcome.message, HasSubstr("do not fit"));
}

TEST(Prefetch, ASessionMayEndWithWhatNobodyTook) {
  const FakeModel model;
  Fleet fleet(model, {});
  Session session = attach_device(fleet.agent());
  EXPECT_EQ(prefetch(session, 10 * kBucket).message, "");
  rk_detach(std::exchange(session.handle, nullptr));
  EXPECT_TRUE(fleet.producer().outcome()) << "the other side has ended, too";
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
