// Buckets that are taken beside what serves, and the switch to them.
#include <algorithm>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/device_fleet.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Kind = proto::WorkerFrame;

// A double has 8 GiB.
constexpr std::uint64_t kAllOfIt = 8ull << 30;

Outcome stage(const Session& session, std::uint64_t reserve_bytes,
              std::int64_t timeout_ms = kPatienceMs) {
  return outcome_of(
      [&](rk_error* error) { return rk_stage(session.handle, reserve_bytes, timeout_ms, error); });
}

TEST(Stage, TakesEveryBucketAndTheProducerHasItsMemoryBack) {
  DeviceWorker worker({.slots = 2});
  EXPECT_EQ(stage(worker.session, 0).message, "");
  EXPECT_FALSE(worker.producer().outcome()) << "it has been given everything back";
  EXPECT_EQ(rk_loaded(worker.session.handle, nullptr), RK_INVALID) << "nobody has them";
  EXPECT_EQ(stage(worker.session, 0).code, RK_OK) << "all are there";
  expect_loads(worker.session, worker.model);
  EXPECT_EQ(rk_loaded(worker.session.handle, nullptr), RK_OK);
}

TEST(Stage, IsHandedOutByBucketsToo) {
  DeviceWorker worker({});
  EXPECT_EQ(stage(worker.session, 0).message, "");
  Collected all(worker.session);
  EXPECT_GT(all.add_all(), 30u);
  all.expect_whole(worker.model);
}

TEST(Stage, WithoutRoomNothingIsTakenAndTheSessionCanBeLoaded) {
  DeviceWorker worker({.slots = 2});
  const Outcome refused = stage(worker.session, kAllOfIt);
  EXPECT_EQ(refused.code, RK_EXHAUSTED);
  EXPECT_THAT(refused.message, HasSubstr("no room to stage qwen3@41 beside what serves"));
  EXPECT_THAT(refused.message, HasSubstr("8.00 GiB"));
  EXPECT_THAT(refused.message, Not(HasSubstr("\n")));
  expect_loads(worker.session, worker.model);
}

TEST(Stage, AZeroTimeoutOnlyLooksForRoom) {
  DeviceWorker worker({.slots = 2});
  EXPECT_EQ(stage(worker.session, kAllOfIt, 0).code, RK_EXHAUSTED);
  const Outcome there_is = stage(worker.session, 0, 0);
  EXPECT_EQ(there_is.code, RK_TIMEOUT);
  EXPECT_THAT(there_is.message, HasSubstr("0 B are staged"));
}

TEST(Stage, ABucketThatIsStillReadRefusesItAndNothingChanges) {
  DeviceWorker worker({.slots = 2});
  Collected all(worker.session);
  const Parts first = next_bucket(worker.session);
  for (const std::int64_t timeout_ms : {std::int64_t{0}, std::int64_t{kPatienceMs}}) {
    const Outcome refused = stage(worker.session, 0, timeout_ms);
    EXPECT_EQ(refused.code, RK_INVALID);
    EXPECT_THAT(refused.message, HasSubstr("cannot stage qwen3@41: a bucket of it is still read"));
    EXPECT_THAT(refused.message, Not(HasSubstr("\n")));
  }
  // The bytes are still there.
  all.add(first.parts);
  all.add_all();
  all.expect_whole(worker.model);
  EXPECT_EQ(stage(worker.session, 0).code, RK_OK)
      << "the last bucket was given back, and no more come";
}

TEST(Stage, NeedsADevice) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, true);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  Session session;
  const rk_attach_options options = attach_options();
  ASSERT_EQ(rk_attach(agent.handle, &options, &session.handle, nullptr), RK_OK);
  EXPECT_EQ(stage(session, 0).code, RK_INVALID);
}

TEST(Stage, TheAgentHearsOfTheSwitchAndOfPhases) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    const auto attach = agent.attach(model, true);
    EXPECT_TRUE(attach.attach().staged());
    const auto begun = agent.expect(Kind::kBeginSwitch);
    EXPECT_EQ(begun.session(), 7u);
    proto::AgentFrame done;
    done.mutable_done();
    agent.answer(begun, done);
    const auto told = agent.expect(Kind::kPhases);
    EXPECT_EQ(told.phases().phases_size(), 2);
    EXPECT_EQ(told.phases().phases(1).name(), "apply");
    EXPECT_EQ(told.phases().phases(1).elapsed_us(), 250u);
    EXPECT_EQ(told.phases().ago_us_size(), 0);
    agent.answer(told, done);
    const auto timed = agent.expect(Kind::kPhases);
    ASSERT_EQ(timed.phases().phases_size(), 2);
    EXPECT_FALSE(timed.phases().phases(0).has_ago_us()) << "an older agent would pass it on late";
    ASSERT_EQ(timed.phases().ago_us_size(), 2);
    EXPECT_EQ(timed.phases().ago_us(0), 0u);
    EXPECT_EQ(timed.phases().ago_us(1), 1u << 20);
    agent.answer(timed, done);
    agent.fail(agent.expect(Kind::kBeginSwitch), proto::STATUS_INVALID, "other ranks");
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  Session session;
  rk_attach_options options = attach_options();
  options.staged = 1;
  rk_error error{};
  ASSERT_EQ(rk_attach(agent.handle, &options, &session.handle, &error), RK_OK) << error.message;
  EXPECT_EQ(rk_begin_switch(session.handle, kPatienceMs, &error), RK_OK) << error.message;
  const rk_phase phases[] = {{"copy", 9}, {"apply", 250}};
  EXPECT_EQ(rk_report_phases(session.handle, phases, 2, &error), RK_OK) << error.message;
  EXPECT_EQ(rk_report_phases(session.handle, nullptr, 2, &error), RK_INVALID);
  const std::uint64_t ago_us[] = {0, 1 << 20};
  EXPECT_EQ(rk_report_phases_ago(session.handle, phases, ago_us, 2, &error), RK_OK)
      << error.message;
  EXPECT_EQ(rk_report_phases_ago(session.handle, phases, nullptr, 2, &error), RK_INVALID);
  EXPECT_THAT(error.message, HasSubstr("the beginnings of 2 phases"));
  EXPECT_EQ(rk_begin_switch(session.handle, kPatienceMs, &error), RK_INVALID);
  EXPECT_THAT(error.message, HasSubstr("other ranks"));
}

}  // namespace
}  // namespace rekindle::client::testing
