// Weights on a device that the worker uploads itself.
#include <algorithm>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/device_worker.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using Kind = proto::WorkerFrame;

// Every type, odd sizes, no elements, no dimensions, and one that is larger than many buckets.
std::vector<TensorInfo> every_kind() {
  std::vector<TensorInfo> all = FakeModel::small_tensors();
  for (int type = static_cast<int>(DType::kBool); type <= static_cast<int>(DType::kF64); ++type) {
    const auto dtype = static_cast<DType>(type);
    all.push_back({fmt::format("type.{}", dtype_name(dtype)), dtype,
                   Shape{7, static_cast<std::uint64_t>(type)}});
  }
  for (const std::uint64_t size : {1u, 255u, 256u, 257u, 65'535u, 65'536u, 65'537u}) {
    all.push_back({fmt::format("odd.{}", size), DType::kU8, Shape{size}});
  }
  return all;
}

// An agent without a device process.
ScriptedAgent::Script uploading(const FakeModel& model, std::vector<TensorBox> boxes = {}) {
  return [&model, boxes = std::move(boxes)](AgentEnd& agent) {
    proto::AgentFrame frame = attached_for(agent, model, true, boxes);
    frame.mutable_attached()->set_no_device_channel("a MIG slice shares no memory");
    agent.send(frame, model.segments());
    agent.until_closed();
  };
}

TEST(DeviceUpload, EveryKindOfTensorArrivesWhole) {
  const FakeModel model(every_kind(), {}, 1 << 20);
  ScriptedAgent server(uploading(model));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  EXPECT_EQ(device_path(session), "upload: a MIG slice shares no memory");
  Collected all(session);
  EXPECT_GT(all.add_all(), 30u);
  all.expect_whole(model);
  EXPECT_EQ(all.parts_of("big"), (2u << 20) / kBucket);
  EXPECT_EQ(all.parts_of("empty"), 1u);
  EXPECT_EQ(all.parts_of("scalar"), 1u);
  EXPECT_EQ(next_bucket(session, 0).code, RK_OK) << "there are still no more";
  EXPECT_TRUE(next_bucket(session, 0).parts.empty());
}

TEST(DeviceUpload, OneBucketHoldsAllThatFits) {
  const FakeModel model;
  ScriptedAgent server(uploading(model));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent, 0);
  Collected all(session);
  EXPECT_EQ(all.add_all(), 1u);
  all.expect_whole(model);
}

TEST(DeviceUpload, BoxesAreCutOutOfTheirRows) {
  const FakeModel model;
  const TensorIndex big = *model.tensors().find("big");
  const TensorIndex wide = *model.tensors().find("wide");
  // The first box is a quarter of dimension 1.
  const std::vector<TensorBox> boxes = {{big, {{0, 256}, {1024, 256}}},
                                        {big, {{100, 0}, {50, 1024}}},
                                        {big, {{200, 7}, {1, 3}}},
                                        {wide, {{0, 33'333}, {3, 1001}}}};
  ScriptedAgent server(uploading(model, boxes));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Collected all(session);
  all.add_all();
  all.expect_whole(model);
  EXPECT_EQ(tensors_of(session).size(), boxes.size());
}

TEST(DeviceUpload, BucketsComeAsTilesDoInAnyOrder) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const FakeModel model(every_kind(), {}, 1 << 20);
  std::vector<TileIndex> tiles(model.tiles().tile_count());
  for (TileIndex i = 0; i < tiles.size(); ++i) tiles[i] = i;
  std::shuffle(tiles.begin(), tiles.end(), std::mt19937_64(seed));
  Gate first;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.send(attached_for(agent, model, false), model.segments());
    agent.answer_pings_until(first);
    for (const TileIndex tile : tiles) agent.send(model.ready(kSession, tile, tile + 1));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  EXPECT_THAT(device_path(session), HasSubstr("upload: the agent"));
  const Parts none = next_bucket(session, 1);
  EXPECT_EQ(none.code, RK_TIMEOUT);
  EXPECT_THAT(none.message, HasSubstr("no further bucket of qwen3@41 yet"));
  first.open();
  Collected all(session);
  all.add_all();
  all.expect_whole(model);
}

TEST(DeviceUpload, AllIsLoadedOnceAllPartsWereHandedOut) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.send(attached_for(agent, model, true), model.segments());
    const auto loaded = agent.expect(Kind::kLoaded);
    EXPECT_EQ(loaded.loaded().bytes(), model.layout().payload_bytes());
    agent.commit(loaded);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  rk_error error{};
  EXPECT_EQ(rk_loaded(session.handle, &error), RK_INVALID);
  EXPECT_THAT(error.message, HasSubstr("5 of 5 tensors have not been taken with rk_next_bucket"));
  Collected all(session);
  all.add(next_bucket(session).parts);
  EXPECT_EQ(rk_loaded(session.handle, &error), RK_INVALID);
  all.add_all();
  EXPECT_EQ(rk_loaded(session.handle, &error), RK_OK) << error.message;
  EXPECT_EQ(rk_wait_commit(session.handle, kPatienceMs, &error), RK_OK) << error.message;
}

TEST(DeviceUpload, ABucketStaysAsItIsUntilTheNextCall) {
  const FakeModel model;
  ScriptedAgent server(uploading(model));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Collected all(session);
  for (int i = 0; i < 4; ++i) {
    const Parts now = next_bucket(session);
    // The others are filled meanwhile.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    all.add(now.parts);
  }
  all.add_all();
  all.expect_whole(model);
}

TEST(DeviceUpload, TwoThreadsTakeTurns) {
  const FakeModel model;
  ScriptedAgent server(uploading(model));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  std::atomic<std::uint64_t> bytes{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (true) {
        const Parts next = next_bucket(session);
        EXPECT_EQ(next.code, RK_OK) << next.message;
        if (next.parts.empty()) return;
        for (const rk_part& part : next.parts) bytes += part.bytes;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bytes.load(), model.layout().payload_bytes());
}

TEST(DeviceUpload, EitherTensorsOrBuckets) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    for (std::uint64_t session = 1; session <= 2; ++session) {
      const auto call = agent.expect(Kind::kAttach);
      agent.send(model.attached(call.call(), session, true), model.segments());
    }
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session on_device = attach_device(agent);
  const Batch wrong = next(on_device);
  EXPECT_EQ(wrong.code, RK_INVALID);
  EXPECT_THAT(wrong.message, HasSubstr("double:0: call rk_next_bucket"));
  const Session on_host = attach_to(agent);
  EXPECT_EQ(device_path(on_host), "");
  const Parts no_device = next_bucket(on_host);
  EXPECT_EQ(no_device.code, RK_INVALID);
  EXPECT_THAT(no_device.message, HasSubstr("without a device"));
  rk_error error{};
  EXPECT_EQ(rk_load_into(on_host.handle, nullptr, 0, 0, &error), RK_INVALID);
  EXPECT_EQ(tensors_of(on_host).size(), 5u);
  EXPECT_EQ(tensors_of(on_host)[0].data, nullptr);
  EXPECT_EQ(all_tensors(on_host).size(), 5u);
}

TEST(DeviceUpload, DevicesThatAreNoneAreRefusedBeforeTheAgentIsAsked) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    EXPECT_TRUE(agent.until_closed().empty());
  });
  const Agent agent = connect_to(server.store());
  const auto refused = [&](const std::function<void(rk_attach_options&)>& spoil) {
    rk_attach_options options = device_options();
    spoil(options);
    rk_session* session = nullptr;
    rk_error error{};
    const std::int32_t code = rk_attach(agent.handle, &options, &session, &error);
    EXPECT_NE(code, RK_OK);
    EXPECT_EQ(session, nullptr);
    return std::pair(code, std::string(error.message));
  };
  for (const char* const name :
       {"", "gpu", "cuda:", "cuda:x", "cuda1", "cuda:-1", "double:", "double:x"}) {
    const auto [code, message] = refused([&](auto& o) { o.device = name; });
    EXPECT_EQ(code, RK_INVALID) << name;
    EXPECT_THAT(message, HasSubstr("is no device")) << name;
  }
  EXPECT_EQ(refused([](auto& o) { o.bucket_bytes = (256u << 20) + 1; }).first, RK_INVALID);
  EXPECT_EQ(refused([](auto& o) { o.bucket_bytes = 255; }).first, RK_INVALID);
  int not_a_stream = 0;
  EXPECT_EQ(refused([&](auto& o) { o.stream = &not_a_stream; }).first, RK_INVALID);
}

TEST(DeviceUpload, AnAnswerThatDoesNotFitTogetherIsRefusedAndUndone) {
  const FakeModel model;
  Gate undone;
  ScriptedAgent server([&](AgentEnd& agent) {
    const proto::AgentFrame frame = attached_for(agent, model, true);
    std::vector<UniqueFd> segments = model.segments();
    segments.pop_back();
    agent.send(frame, std::move(segments));
    EXPECT_EQ(agent.expect(Kind::kDetach).session(), kSession);
    undone.open();
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const rk_attach_options options = device_options();
  rk_session* session = nullptr;
  rk_error error{};
  EXPECT_EQ(rk_attach(agent.handle, &options, &session, &error), RK_INTERNAL);
  EXPECT_THAT(error.message, HasSubstr("descriptors for"));
  undone.wait();
}

TEST(DeviceUpload, WhoWaitsForABucketOfASessionThatIsDetachedIsTold) {
  const FakeModel model;
  Gate asked;
  ScriptedAgent server([&](AgentEnd& agent) {
    proto::AgentFrame frame = attached_for(agent, model, false);
    agent.send(frame, model.segments());
    agent.send(model.ready(kSession, model.first_tile("small"), model.end_tile("small")));
    agent.expect(Kind::kDetach);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  Session session = attach_device(agent);
  std::thread waiter([&asked, handle = session.handle] {
    const rk_part* parts = nullptr;
    std::size_t count = 0;
    asked.open();
    std::int32_t code = RK_OK;
    do {
      code = rk_next_bucket(handle, kPatienceMs, &parts, &count, nullptr);
    } while (code == RK_OK);
    EXPECT_EQ(code, RK_STALE);
  });
  asked.wait();
  // The call is inside the library now.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  rk_detach(std::exchange(session.handle, nullptr));
  waiter.join();
}

TEST(DeviceUpload, ASessionThatTheAgentEndsSaysWhy) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.send(attached_for(agent, model, false), model.segments());
    agent.end_session(kSession, proto::STATUS_CORRUPT, "tile 3 of big does not verify anywhere");
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Parts last;
  do last = next_bucket(session);
  while (last.code == RK_OK && !last.parts.empty());
  EXPECT_EQ(last.code, RK_CORRUPT);
  EXPECT_EQ(last.message, "tile 3 of big does not verify anywhere");
}

}  // namespace
}  // namespace rekindle::client::testing
