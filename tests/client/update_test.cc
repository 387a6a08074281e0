// Groups, and updates of groups.
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/worker.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using Kind = proto::WorkerFrame;

rk_update_options update_options(const char* model_version = "qwen3@42") {
  rk_update_options options{};
  options.size = sizeof options;
  options.model_version = model_version;
  options.group = "chat";
  options.gather_ms = 1500;
  options.members = 8;
  options.timeout_ms = kPatienceMs;
  return options;
}

rk_update_result update_result() {
  rk_update_result result;
  std::memset(&result, 0xee, sizeof result);
  result.size = sizeof result;
  return result;
}

proto::AgentFrame updated(std::uint32_t ready, const std::string& why) {
  proto::AgentFrame frame;
  frame.mutable_updated()->set_members(8);
  frame.mutable_updated()->set_ready(ready);
  frame.mutable_updated()->set_by_broadcast(6);
  frame.mutable_updated()->set_elapsed_ms(510);
  frame.mutable_updated()->set_why(why);
  auto& phase = *frame.mutable_updated()->add_phases();
  phase.set_name("apply");
  phase.set_median_us(10);
  phase.set_p95_us(20);
  phase.set_slowest_us(30);
  std::string name(231, 'x');
  name += "\xc3\xa4";
  phase.set_slowest(name);
  return frame;
}

TEST(Update, SaysWhatBecameOfTheGroup) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kUpdate);
    EXPECT_EQ(call.update().id().model(), "qwen3");
    EXPECT_EQ(call.update().id().version(), 42u);
    EXPECT_EQ(call.update().group(), "chat");
    EXPECT_EQ(call.update().gather_ms(), 1500u);
    EXPECT_EQ(call.update().members(), 8u);
    EXPECT_EQ(call.deadline_ms(), static_cast<std::uint32_t>(kPatienceMs));
    agent.answer(call, updated(8, ""));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const rk_update_options options = update_options();
  rk_update_result result = update_result();
  rk_error error{};
  ASSERT_EQ(rk_update(agent.handle, &options, &result, &error), RK_OK) << error.message;
  EXPECT_EQ(result.size, sizeof result);
  EXPECT_EQ(result.members, 8u);
  EXPECT_EQ(result.ready, 8u);
  EXPECT_EQ(result.by_broadcast, 6u);
  EXPECT_EQ(result.elapsed_ms, 510u);
  ASSERT_EQ(result.phase_count, 1u);
  EXPECT_STREQ(result.phases[0].name, "apply");
  EXPECT_EQ(result.phases[0].median_us, 10u);
  EXPECT_EQ(result.phases[0].p95_us, 20u);
  EXPECT_EQ(result.phases[0].slowest_us, 30u);
  EXPECT_EQ(result.phases[0].slowest, std::string(231, 'x')) << "cut before the whole character";
}

TEST(Update, NotAllReadyIsUnavailableAndTheResultIsThere) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    for (int i = 0; i < 2; ++i) {
      agent.answer(agent.expect(Kind::kUpdate), updated(7, "rank 1 of i on b: died"));
    }
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const rk_update_options options = update_options();
  rk_update_result result = update_result();
  rk_error error{};
  EXPECT_EQ(rk_update(agent.handle, &options, &result, &error), RK_UNAVAILABLE);
  EXPECT_THAT(error.message, HasSubstr("7 of 8 workers"));
  EXPECT_THAT(error.message, HasSubstr("rank 1 of i on b: died"));
  EXPECT_EQ(result.ready, 7u);
  EXPECT_EQ(rk_update(agent.handle, &options, nullptr, nullptr), RK_UNAVAILABLE)
      << "without a place for it";
}

TEST(Update, AnOlderCallersResultIsNotOverrun) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kUpdate);
    EXPECT_EQ(call.update().group(), "");
    EXPECT_EQ(call.update().gather_ms(), 0u);
    EXPECT_EQ(call.deadline_ms(), 600'000u);
    agent.answer(call, updated(8, ""));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_update_options options = update_options();
  options.size = offsetof(rk_update_options, group);
  rk_update_result result = update_result();
  result.size = offsetof(rk_update_result, by_broadcast);
  ASSERT_EQ(rk_update(agent.handle, &options, &result, nullptr), RK_OK);
  EXPECT_EQ(result.ready, 8u);
  EXPECT_EQ(result.by_broadcast, 0xeeeeeeeeu);
  EXPECT_EQ(result.size, offsetof(rk_update_result, by_broadcast));
}

TEST(Update, ARefusalKeepsItsCodeAndALostAgentIsLost) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    agent.fail(agent.expect(Kind::kUpdate), proto::STATUS_NOT_FOUND, "no worker of chat");
    agent.fail(agent.expect(Kind::kUpdate), proto::STATUS_TIMEOUT, "it goes on");
    agent.expect(Kind::kUpdate);
    agent.close();
  });
  const Agent agent = connect_to(server.store());
  const rk_update_options options = update_options();
  rk_error error{};
  EXPECT_EQ(rk_update(agent.handle, &options, nullptr, &error), RK_NOT_FOUND);
  EXPECT_THAT(error.message, HasSubstr("no worker of chat"));
  EXPECT_EQ(rk_update(agent.handle, &options, nullptr, nullptr), RK_TIMEOUT);
  EXPECT_EQ(rk_update(agent.handle, &options, nullptr, nullptr), RK_PEER_LOST);
}

TEST(Update, WhatIsWrongAsksNobody) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    EXPECT_TRUE(agent.until_closed().empty());
  });
  const Agent agent = connect_to(server.store());
  rk_error error{};
  rk_update_options options = update_options("qwen3");
  EXPECT_EQ(rk_update(agent.handle, &options, nullptr, &error), RK_INVALID);
  EXPECT_THAT(error.message, HasSubstr("which version"));
  options = update_options(nullptr);
  EXPECT_EQ(rk_update(agent.handle, &options, nullptr, nullptr), RK_INVALID);
  options = update_options();
  options.gather_ms = -1;
  EXPECT_EQ(rk_update(agent.handle, &options, nullptr, nullptr), RK_INVALID);
  options = update_options();
  rk_update_result result{};
  EXPECT_EQ(rk_update(agent.handle, &options, &result, &error), RK_INVALID);
  EXPECT_THAT(error.message, HasSubstr("size"));
}

TEST(Update, AWorkerOfAGroupSaysSoAndHearsOfAnOlderVersion) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    const auto call = agent.attach(model, true);
    EXPECT_EQ(call.attach().group(), "chat");
    const auto watch = agent.expect(Kind::kWatch);
    proto::AgentFrame frame;
    frame.mutable_new_version()->mutable_id()->set_model("qwen3");
    frame.mutable_new_version()->mutable_id()->set_version(40);
    agent.answer(watch, frame);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_attach_options options = attach_options();
  options.group = "chat";
  Session session;
  rk_error error{};
  ASSERT_EQ(rk_attach(agent.handle, &options, &session.handle, &error), RK_OK) << error.message;
  std::uint64_t version = 0;
  ASSERT_EQ(rk_wait_update(session.handle, kPatienceMs, &version, &error), RK_OK) << error.message;
  EXPECT_EQ(version, 40u);
}

}  // namespace
}  // namespace rekindle::client::testing
