// Weights on a device, in buckets that another process (here: another thread) fills.
#include <cstddef>
#include <optional>
#include <thread>

#include <sys/socket.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/device_fleet.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Kind = proto::WorkerFrame;

TEST(DeviceIpc, EveryTensorArrivesWhole) {
  DeviceWorker worker({});
  EXPECT_EQ(device_path(worker.session), "ipc");
  Collected all(worker.session);
  EXPECT_GT(all.add_all(), 30u);
  all.expect_whole(worker.model);
  EXPECT_EQ(device_path(worker.session), "ipc");
  const auto outcome = worker.producer().outcome();
  EXPECT_FALSE(outcome) << outcome->message();
  EXPECT_TRUE(next_bucket(worker.session, 0).parts.empty());
}

TEST(DeviceIpc, TheListOfTensorsIsReadAtItsFirstUse) {
  const FakeModel model;
  std::optional<DeviceProducer> producer;
  ScriptedAgent server([&](AgentEnd& agent) {
    proto::AgentFrame frame = attached_for(agent, model, true);
    frame.mutable_attached()->set_device_channel(true);
    producer.emplace(model, frame);
    std::vector<UniqueFd> descriptors = model.segments();
    descriptors.push_back(producer->take_worker_end());
    frame.mutable_attached()->set_tensor_set("nonsense");
    agent.send(frame, std::move(descriptors));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  std::size_t count = 0;
  EXPECT_EQ(rk_tensor_count(session.handle, &count, nullptr), RK_OK);
  EXPECT_EQ(count, model.layout().entries().size());
  rk_session_info info{};
  info.size = offsetof(rk_session_info, bytes_done);
  EXPECT_EQ(rk_info(session.handle, &info, nullptr), RK_OK);
  EXPECT_STREQ(info.model, "qwen3");
  EXPECT_EQ(info.version, 41u);
  // Buckets are copied without the list.
  EXPECT_EQ(rk_prefetch(session.handle, 1ull << 30, kPatienceMs, nullptr), RK_OK);
  EXPECT_GT(producer->filled(), 30u);

  rk_error error{};
  info.size = sizeof info;
  EXPECT_EQ(rk_info(session.handle, &info, &error), RK_INTERNAL);
  EXPECT_THAT(error.message, HasSubstr("does not fit together"));
  const rk_tensor* tensors = nullptr;
  EXPECT_EQ(rk_tensors(session.handle, &tensors, &count, &error), RK_INTERNAL);
  EXPECT_THAT(error.message, HasSubstr("does not fit together"));
  EXPECT_EQ(next_bucket(session).code, RK_INTERNAL) << "the session has ended";
}

TEST(DeviceIpc, OneSlotIsEnough) {
  const FakeModel model;
  const TensorIndex big = *model.tensors().find("big");
  Fleet fleet(model, {.slots = 1}, {{big, {{0, 512}, {1024, 512}}}, {big, {{3, 0}, {1, 1024}}}});
  const Session session = attach_device(fleet.agent());
  Collected all(session);
  all.add_all();
  all.expect_whole(model);
  EXPECT_FALSE(fleet.producer().outcome());
}

TEST(DeviceIpc, ADeviceProcessThatDiesMidwayIsUnavailable) {
  DeviceWorker worker({.dies_after = 7});
  Parts last;
  do last = next_bucket(worker.session);
  while (last.code == RK_OK && !last.parts.empty());
  EXPECT_EQ(last.code, RK_UNAVAILABLE);
  EXPECT_THAT(last.message, HasSubstr("the device process"));
  EXPECT_THAT(last.message, HasSubstr("detach and attach again"));
  EXPECT_EQ(next_bucket(worker.session).code, RK_UNAVAILABLE) << "and stays so";
  EXPECT_EQ(rk_loaded(worker.session.handle, nullptr), RK_INVALID);
}

TEST(DeviceIpc, AnAgentThatDiesWithItsDeviceProcessIsLost) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    proto::AgentFrame frame = attached_for(agent, model, true);
    frame.mutable_attached()->set_device_channel(true);
    DeviceProducer producer(model, frame, {.dies_after = 7});
    std::vector<UniqueFd> descriptors = model.segments();
    descriptors.push_back(producer.take_worker_end());
    agent.send(frame, std::move(descriptors));
    // It ends first.
    producer.outcome();
    agent.close();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Parts last;
  do last = next_bucket(session);
  while (last.code == RK_OK && !last.parts.empty());
  EXPECT_EQ(last.code, RK_PEER_LOST) << last.message;
  EXPECT_EQ(next_bucket(session).code, RK_PEER_LOST) << "and stays so";
}

TEST(DeviceIpc, WhatTheDeviceProcessRefusesIsUploaded) {
  DeviceWorker worker({.refuses = Error(ErrorCode::kUnavailable, "a MIG slice")});
  Collected all(worker.session);
  all.add_all();
  all.expect_whole(worker.model);
  EXPECT_EQ(device_path(worker.session), "upload: the device process: a MIG slice");
}

// An agent that verifies uploads. If bytes are wrong or cannot be verified, the worker does not
// replace them by uploads that nobody verifies.
TEST(DeviceIpc, WhatTheDeviceProcessCannotVerifyIsNotUploaded) {
  const FakeModel model;
  for (const auto& [code, expected] :
       {std::pair{ErrorCode::kCorrupt, RK_CORRUPT}, std::pair{ErrorCode::kDenied, RK_DENIED}}) {
    Fleet fleet(model, {.refuses = Error(code, "tensor 'big'")});
    const Session session = attach_device(fleet.agent());
    const Parts first = next_bucket(session);
    EXPECT_EQ(first.code, expected) << first.message;
    EXPECT_THAT(first.message, HasSubstr("tensor 'big'"));
  }
}

TEST(DeviceIpc, WhatThisProcessCannotOpenIsUploadedAndTheOtherIsTold) {
  DeviceWorker worker({.spoils_handles = true});
  Collected all(worker.session);
  all.add_all();
  all.expect_whole(worker.model);
  EXPECT_THAT(device_path(worker.session), StartsWith("upload: "));
  const auto outcome = worker.producer().outcome();
  ASSERT_TRUE(outcome);
  EXPECT_THAT(outcome->message(), HasSubstr("no handle"));
}

TEST(DeviceIpc, ADeviceProcessThatDiesBeforeTheFirstBucketIsReplacedByUploads) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    proto::AgentFrame frame = attached_for(agent, model, true);
    frame.mutable_attached()->set_device_channel(true);
    std::vector<UniqueFd> descriptors = model.segments();
    {
      DeviceProducer gone(model, frame, {.refuses = Error(ErrorCode::kInternal, "Xid 79")});
      descriptors.push_back(gone.take_worker_end());
    }
    agent.send(frame, std::move(descriptors));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Collected all(session);
  all.add_all();
  all.expect_whole(model);
  EXPECT_THAT(device_path(session), HasSubstr("Xid 79"));
}

TEST(DeviceIpc, PartsThatDoNotFitAreRefused) {
  DeviceWorker worker({.spoils_parts = true});
  Parts last;
  do last = next_bucket(worker.session);
  while (last.code == RK_OK && !last.parts.empty());
  EXPECT_EQ(last.code, RK_INTERNAL);
  EXPECT_THAT(last.message, HasSubstr("do not fit"));
}

TEST(DeviceIpc, DetachingAmidTheBucketsEndsTheOtherSide) {
  DeviceWorker worker({});
  EXPECT_EQ(next_bucket(worker.session).code, RK_OK);
  EXPECT_EQ(next_bucket(worker.session).code, RK_OK);
  rk_detach(std::exchange(worker.session.handle, nullptr));
  const auto outcome = worker.producer().outcome();
  ASSERT_TRUE(outcome);
  EXPECT_EQ(outcome->code(), ErrorCode::kPeerLost);
}

TEST(DeviceIpc, WhoWaitsForABucketOfASessionThatIsDetachedIsTold) {
  const FakeModel model;
  Gate attached;
  ScriptedAgent server([&](AgentEnd& agent) {
    proto::AgentFrame frame = attached_for(agent, model, true);
    frame.mutable_attached()->set_device_channel(true);
    std::vector<UniqueFd> descriptors = model.segments();
    // A socket without a peer that speaks.
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    const UniqueFd mute(ends[0]);
    descriptors.emplace_back(ends[1]);
    agent.send(frame, std::move(descriptors));
    agent.expect(Kind::kDetach);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  Session session = attach_device(agent);
  std::thread waiter([&attached, handle = session.handle] {
    const rk_part* parts = nullptr;
    std::size_t count = 0;
    attached.open();
    EXPECT_EQ(rk_next_bucket(handle, kPatienceMs, &parts, &count, nullptr), RK_STALE);
  });
  attached.wait();
  // The call is inside the library now.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  rk_detach(std::exchange(session.handle, nullptr));
  waiter.join();
}

}  // namespace
}  // namespace rekindle::client::testing
