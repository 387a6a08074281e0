// A worker process in C against a scripted agent.
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/scripted_agent.h"

namespace rekindle::client::testing {
namespace {

using rekindle::testing::Exit;
using rekindle::testing::Process;
using ::testing::HasSubstr;
using Kind = proto::WorkerFrame;

std::string line_of(const FakeModel& model, const TensorInfo& tensor) {
  const std::string bytes = model.bytes_of(tensor.name, Box::whole(tensor.shape));
  std::uint64_t sum = 0;
  for (const char c : bytes) sum += static_cast<std::uint8_t>(c);
  return fmt::format("tensor {} {} {} sum={}\n", tensor.name, dtype_name(tensor.dtype),
                     bytes.size(), sum);
}

proto::AgentFrame newer(std::uint64_t version) {
  proto::AgentFrame frame;
  frame.mutable_new_version()->mutable_id()->set_model("qwen3");
  frame.mutable_new_version()->mutable_id()->set_version(version);
  return frame;
}

TEST(WorkerProcess, LoadsServesAndLearnsOfANewVersion) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, true);
    agent.commit(agent.expect(Kind::kLoaded));
    agent.answer(agent.expect(Kind::kWatch), newer(42));
    const auto rest = agent.until_closed();
    ASSERT_EQ(rest.size(), 1u);
    EXPECT_EQ(rest[0].kind_case(), Kind::kDetach);
  });
  Process worker({.argv = {C_WORKER, server.store()}});
  const auto exit = worker.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 0) << worker.err();
  const std::string out = worker.out();
  for (const TensorInfo& tensor : model.tensors().tensors()) {
    EXPECT_THAT(out, HasSubstr(line_of(model, tensor)));
  }
  EXPECT_THAT(out, HasSubstr("serving\nnewer 42\n"));
}

TEST(WorkerProcess, ItsDeathIsSeenByTheFutexOfTheHello) {
  const FakeModel model;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<ipc::DeathSign> seen;
  auto watch = ipc::LifeWatch::start([&](const ipc::Death& death) {
    const std::lock_guard lock(mutex);
    seen = death.sign;
    changed.notify_all();
  });
  ASSERT_TRUE(watch);
  Gate watched;
  ScriptedAgent server([&](AgentEnd& agent) {
    auto page = agent.hello();
    ASSERT_TRUE((*watch)->add(1, std::move(page), std::move(agent.peer())));
    const auto attach = agent.expect(Kind::kAttach);
    agent.send(model.attached(attach.call(), kSession, true), model.segments());
    agent.commit(agent.expect(Kind::kLoaded));
    agent.expect(Kind::kWatch);
    watched.open();
    agent.until_closed();
  });
  Process worker({.argv = {C_WORKER, server.store()}});
  watched.wait();
  worker.kill();
  std::unique_lock lock(mutex);
  changed.wait_for(lock, std::chrono::seconds(20), [&] { return seen.has_value(); });
  EXPECT_EQ(seen, ipc::DeathSign::kFutex);
}

TEST(WorkerProcess, Row41AnAgentThatDiesWhileItLoadsIsItsError) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    agent.send(model.ready(kSession, model.first_tile("small"), model.end_tile("small")));
    agent.close();
  });
  Process worker({.argv = {C_WORKER, server.store()}});
  const auto exit = worker.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 1);
  EXPECT_THAT(worker.err(), HasSubstr("PEER_LOST"));
}

TEST(WorkerProcess, AStoppedWorkerFindsItsAgentWhenItGoesOn) {
  const FakeModel model;
  Gate serving, stopped;
  ScriptedAgent server([&](AgentEnd& agent) {
    // A worker that ignored its own stop would give up the agent.
    agent.hello(10, 300);
    const auto attach = agent.expect(Kind::kAttach);
    agent.send(model.attached(attach.call(), kSession, true), model.segments());
    agent.commit(agent.expect(Kind::kLoaded));
    const auto watch = agent.expect(Kind::kWatch);
    serving.open();
    agent.answer_pings_until(stopped);
    agent.answer(watch, newer(42));
    agent.until_closed();
  });
  Process worker({.argv = {C_WORKER, server.store()}});
  ASSERT_TRUE(worker.wait_for_out("serving"));
  serving.wait();
  worker.signal(SIGSTOP);
  // Longer than the silence.
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  worker.signal(SIGCONT);
  stopped.open();
  const auto exit = worker.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 0) << worker.err();
}

}  // namespace
}  // namespace rekindle::client::testing
