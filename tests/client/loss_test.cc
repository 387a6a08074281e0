// Agents that do not run, die, fall silent or break the protocol.
#include <filesystem>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/worker.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using Kind = proto::WorkerFrame;

struct Outcome {
  std::int32_t code;
  std::string message;
};

Outcome try_connect(const std::string& store, std::int64_t timeout_ms = kPatienceMs) {
  const rk_connect_options options{sizeof options, store.c_str(), timeout_ms};
  rk_agent* agent = nullptr;
  rk_error error{};
  const std::int32_t code = rk_connect(&options, &agent, &error);
  EXPECT_EQ(agent == nullptr, code != RK_OK);
  rk_disconnect(agent);
  return {code, error.message};
}

Outcome try_attach(const Agent& agent) {
  const rk_attach_options options = attach_options();
  rk_session* session = nullptr;
  rk_error error{};
  const std::int32_t code = rk_attach(agent.handle, &options, &session, &error);
  rk_detach(session);
  return {code, error.message};
}

TEST(Loss, NoAgentIsUnavailableAndSaysHowToStartOne) {
  const rekindle::testing::TempDir directory;
  const Outcome none = try_connect(directory.path().string(), 100);
  EXPECT_EQ(none.code, RK_UNAVAILABLE);
  EXPECT_THAT(none.message, HasSubstr("rekindle agent --store"));
  EXPECT_EQ(try_connect(std::string(200, 'x')).code, RK_INVALID);
}

TEST(Loss, AnAgentThatHasGoneIsUnavailable) {
  ScriptedAgent server(std::vector<ScriptedAgent::Script>{});
  server.finish();
  server.stop_listening();
  EXPECT_EQ(try_connect(server.store(), 100).code, RK_UNAVAILABLE);
}

TEST(Loss, AStoreThatOthersCanEnterIsDenied) {
  ScriptedAgent server(std::vector<ScriptedAgent::Script>{});
  ASSERT_EQ(::chmod((server.store() + "/agent").c_str(), 0755), 0);
  const Outcome denied = try_connect(server.store());
  EXPECT_EQ(denied.code, RK_DENIED);
  EXPECT_THAT(denied.message, HasSubstr("chmod 700"));
}

TEST(Loss, AnAgentThatNeverAnswersTheHelloTimesOut) {
  Gate done;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.expect(Kind::kHello);
    done.wait();
  });
  EXPECT_EQ(try_connect(server.store(), 10).code, RK_TIMEOUT);
  done.open();
}

TEST(Loss, AnAgentThatDiesAmidAnAttachIsLost) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    agent.expect(Kind::kAttach);
    agent.close();
  });
  const Agent agent = connect_to(server.store());
  const Outcome lost = try_attach(agent);
  EXPECT_EQ(lost.code, RK_PEER_LOST);
  EXPECT_THAT(lost.message, HasSubstr("connect again"));
  EXPECT_EQ(try_attach(agent).code, RK_PEER_LOST) << "it stays lost";
}

TEST(Loss, AnAgentThatDiesAmidTheFramesOfAnAttachIsLost) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    agent.expect(Kind::kAttach);
    agent.send_raw(std::string_view("\0\0\1\0\0\0\0\0half of it", 18));
    agent.close();
  });
  const Agent agent = connect_to(server.store());
  EXPECT_EQ(try_attach(agent).code, RK_PEER_LOST);
}

TEST(Loss, TensorsStayReadableAndANextLifeIsFound) {
  const FakeModel model;
  Gate die;
  const auto life = [&](AgentEnd& agent) {
    agent.attach(model, true);
    die.wait();
  };
  const auto next_life = [&](AgentEnd& agent) {
    agent.attach(model, true);
    agent.until_closed();
  };
  ScriptedAgent server({life, next_life});
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const std::vector<rk_tensor> tensors = all_tensors(session);
  die.open();
  rk_error error{};
  EXPECT_EQ(rk_wait_update(session.handle, kPatienceMs, nullptr, &error), RK_PEER_LOST);
  EXPECT_EQ(rk_loaded(session.handle, nullptr), RK_PEER_LOST);
  EXPECT_EQ(next(session, 0).code, RK_PEER_LOST);
  rk_session_info info{};
  info.size = sizeof info;
  EXPECT_EQ(rk_info(session.handle, &info, nullptr), RK_OK) << "what is known stays known";
  for (const rk_tensor& tensor : tensors) expect_bytes(model, tensor);

  const Agent again = connect_to(server.store());
  const Session second = attach_to(again);
  EXPECT_EQ(all_tensors(second).size(), tensors.size());
}

TEST(Loss, AWaitingCallEndsWhenTheAgentDies) {
  const FakeModel model({{"w", DType::kU8, Shape{100}}}, {}, 1 << 20);
  Gate waiting;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    waiting.wait();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  std::thread opener([&] { waiting.open(); });
  EXPECT_EQ(next(session).code, RK_PEER_LOST);
  opener.join();
}

TEST(Loss, ASilentAgentIsLost) {
  Gate done;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello(10, 50);
    // Reads nothing and answers no ping.
    done.wait();
  });
  const Agent agent = connect_to(server.store());
  const Outcome lost = try_attach(agent);
  EXPECT_EQ(lost.code, RK_PEER_LOST);
  EXPECT_THAT(lost.message, HasSubstr("silent"));
  done.open();
}

TEST(Loss, PingsKeepAQuietAgent) {
  Gate answered;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello(10);
    // 30 pings come and are answered before any other message.
    for (int i = 0; i < 30; ++i) agent.expect_ping();
    answered.open();
    agent.fail(agent.expect(Kind::kAttach), proto::STATUS_NOT_FOUND, "no such model");
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  answered.wait();
  EXPECT_EQ(try_attach(agent).code, RK_NOT_FOUND);
}

// Messages that break the protocol. Each of them ends the connection.
void expect_broken(const ScriptedAgent::Script& misbehave, const std::string& why) {
  SCOPED_TRACE(why);
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    agent.expect(Kind::kAttach);
    misbehave(agent);
    // The library closes its end.
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Outcome lost = try_attach(agent);
  EXPECT_EQ(lost.code, RK_PEER_LOST);
  EXPECT_THAT(lost.message, HasSubstr(why));
}

std::vector<UniqueFd> two_files() {
  std::vector<UniqueFd> out;
  for (int i = 0; i < 2; ++i) out.emplace_back(::memfd_create("stray", MFD_CLOEXEC));
  return out;
}

TEST(Loss, WhatIsNoFrameLosesTheConnection) {
  expect_broken([](AgentEnd& a) { a.send_raw(std::string(8, '\xff')); }, "unknown flags");
  expect_broken([](AgentEnd& a) { a.send_raw(std::string_view("\x7f\0\0\0\0\0\0\0", 8)); },
                "over the cap");
  expect_broken([](AgentEnd& a) { a.send_raw(std::string_view("\0\0\0\0\0\0\0\0", 8)); }, "empty");
  expect_broken(
      [](AgentEnd& a) { a.send_raw(std::string_view("\0\0\0\3\0\0\0\0\xff\xff\xff", 11)); },
      "malformed");
  expect_broken([](AgentEnd& a) { a.send_raw(std::string_view("\0\0\0\2\0\0\0\0\x08\1", 10)); },
                "without a known kind");
  expect_broken([](AgentEnd& a) { a.send_raw(std::string_view("\0\0\0\2\0\3\0\0\x08\1", 10)); },
                "declares 3 descriptors");
  expect_broken([](AgentEnd& a) { a.send_uncounted(proto::AgentFrame(), two_files()); },
                "2 descriptors came");
}

TEST(Loss, AnErrorOfACodeThatIsNewerThanTheLibraryIsAnError) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    agent.fail(agent.expect(Kind::kAttach), static_cast<proto::StatusCode>(77), "from the future");
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Outcome failed = try_attach(agent);
  EXPECT_EQ(failed.code, RK_INTERNAL);
  EXPECT_THAT(failed.message, HasSubstr("from the future"));
}

}  // namespace
}  // namespace rekindle::client::testing
