// Several threads on one session or connection.
#include <atomic>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/worker.h"

namespace rekindle::client::testing {
namespace {

using Kind = proto::WorkerFrame;

std::vector<TensorInfo> many_tensors(int count) {
  std::vector<TensorInfo> infos;
  for (int i = 0; i < count; ++i) {
    infos.push_back({"t" + std::to_string(1000 + i), DType::kU8, Shape{64}});
  }
  return infos;
}

TEST(Threads, EachTensorGoesToOneOfThem) {
  constexpr int kTensors = 200;
  const FakeModel model(many_tensors(kTensors), {}, 1 << 20);
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    for (TileIndex tile = 0; tile < model.tiles().tile_count(); ++tile) {
      agent.send(model.ready(kSession, tile, tile + 1));
    }
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  std::vector<rk_tensor> taken[2];
  std::thread threads[2];
  for (int i = 0; i < 2; ++i) {
    threads[i] = std::thread([&, i] { taken[i] = all_tensors(session); });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<std::string> names;
  for (const auto& tensors : taken) {
    for (const rk_tensor& tensor : tensors) {
      EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name << " was handed out twice";
      expect_bytes(model, tensor);
    }
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kTensors));
}

TEST(Threads, InfoAnswersWhileAnotherWaits) {
  const FakeModel model(many_tensors(1), {}, 1 << 20);
  Gate asked;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    asked.wait();
    agent.send(model.ready(kSession, 0, 1));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  std::thread waiter([&] { EXPECT_EQ(all_tensors(session).size(), 1u); });
  rk_session_info info{};
  info.size = sizeof info;
  EXPECT_EQ(rk_info(session.handle, &info, nullptr), RK_OK);
  EXPECT_EQ(info.bytes_done, 0u);
  EXPECT_EQ(rk_wait_update(session.handle, 0, nullptr, nullptr), RK_TIMEOUT);
  asked.open();
  waiter.join();
}

TEST(Threads, ASecondCallerOfNextTimesOutWhileTheFirstWaits) {
  const FakeModel model(many_tensors(1), {}, 1 << 20);
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  std::thread waiter([&] { EXPECT_EQ(next(session, 200).code, RK_TIMEOUT); });
  EXPECT_EQ(next(session, 10).code, RK_TIMEOUT);
  waiter.join();
}

TEST(Threads, WhoWaitsOnASessionThatIsDetachedIsTold) {
  const FakeModel model(many_tensors(1), {}, 1 << 20);
  Gate watched;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    agent.expect(Kind::kWatch);
    watched.open();
    EXPECT_EQ(agent.expect(Kind::kDetach).session(), kSession);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  Session session = attach_to(agent);
  std::thread waiter([handle = session.handle] {
    EXPECT_EQ(rk_wait_update(handle, kPatienceMs, nullptr, nullptr), RK_STALE);
  });
  // The call is inside the library now.
  watched.wait();
  rk_detach(std::exchange(session.handle, nullptr));
  waiter.join();
}

TEST(Threads, WhoWaitsOnAnAgentThatIsDisconnectedIsTold) {
  const FakeModel model(many_tensors(1), {}, 1 << 20);
  Gate watched;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    agent.expect(Kind::kWatch);
    watched.open();
    agent.until_closed();
  });
  Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  std::thread waiter(
      [&] { EXPECT_EQ(rk_wait_update(session.handle, kPatienceMs, nullptr, nullptr), RK_STALE); });
  watched.wait();
  rk_disconnect(std::exchange(agent.handle, nullptr));
  waiter.join();
  EXPECT_EQ(next(session, 0).code, RK_STALE);
}

TEST(Threads, AnInterruptEndsCallsAndKeepsTheHandle) {
  const FakeModel model(many_tensors(1), {}, 1 << 20);
  Gate watched;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    agent.expect(Kind::kWatch);
    watched.open();
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  std::thread waiter(
      [&] { EXPECT_EQ(rk_wait_update(session.handle, kPatienceMs, nullptr, nullptr), RK_STALE); });
  watched.wait();
  rk_interrupt(agent.handle);
  waiter.join();
  rk_interrupt(agent.handle);
  EXPECT_EQ(next(session, 0).code, RK_STALE);
  const rk_update_options options{.size = sizeof options, .model_version = "m@1"};
  EXPECT_EQ(rk_update(agent.handle, &options, nullptr, nullptr), RK_STALE) << "a later call";
  rk_interrupt(nullptr);
}

TEST(Threads, SessionsOfOneConnectionDoNotMix) {
  const FakeModel first(many_tensors(3), {}, 1 << 20);
  const FakeModel second(many_tensors(5), {}, 1 << 20);
  Gate both;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    auto call = agent.expect(Kind::kAttach);
    agent.send(first.attached(call.call(), 1, false), first.segments());
    call = agent.expect(Kind::kAttach);
    agent.send(second.attached(call.call(), 2, false), second.segments());
    // There is no such session.
    agent.send(first.ready(99, 0, 3));
    agent.send(second.ready(2, 0, 5));
    agent.end_session(1, proto::STATUS_STALE, "retired");  // last: somebody waits for it
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session one = attach_to(agent);
  const Session two = attach_to(agent);
  EXPECT_EQ(all_tensors(two).size(), 5u);
  EXPECT_EQ(next(one).code, RK_STALE);
  EXPECT_EQ(next(two, 0).code, RK_OK);
}

TEST(Threads, ManyCallsAtOnceAreAnsweredEachWithItsOwn) {
  constexpr int kThreads = 8;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    std::vector<proto::WorkerFrame> calls;
    for (int i = 0; i < kThreads; ++i) calls.push_back(agent.expect(Kind::kAttach));
    // The last call is answered first.
    for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
      agent.fail(*call, proto::STATUS_NOT_FOUND, "no " + call->attach().model());
    }
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&agent, i] {
      const std::string model = "model" + std::to_string(i);
      const rk_attach_options options = attach_options(model.c_str());
      rk_session* session = nullptr;
      rk_error error{};
      EXPECT_EQ(rk_attach(agent.handle, &options, &session, &error), RK_NOT_FOUND);
      EXPECT_EQ(std::string(error.message), "attach " + model + ": no " + model);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace rekindle::client::testing
