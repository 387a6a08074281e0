// Weights copied into the worker's own memory of a device.
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/device_fleet.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;

ScriptedAgent::Script serving(const FakeModel& model, std::vector<TensorBox> boxes = {}) {
  return [&model, boxes = std::move(boxes)](AgentEnd& agent) {
    agent.send(attached_for(agent, model, true, boxes), model.segments());
    agent.until_closed();
  };
}

TEST(LoadInto, EveryTargetGetsItsTensor) {
  const FakeModel model;
  ScriptedAgent server(serving(model));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Parameters own(session);
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
  EXPECT_EQ(load_into(session, own.targets()).code, RK_OK) << "it is done";
}

TEST(LoadInto, BucketsOfTheDeviceProcessServeAsWell) {
  DeviceWorker worker({});
  expect_loads(worker.session, worker.model);
  EXPECT_EQ(device_path(worker.session), "ipc");
  EXPECT_FALSE(worker.producer().outcome());
}

TEST(LoadInto, BoxesAreToldApartByTheirOffset) {
  const FakeModel model;
  const TensorIndex big = *model.tensors().find("big");
  ScriptedAgent server(serving(
      model,
      {{big, {{0, 0}, {1024, 128}}}, {big, {{0, 512}, {1024, 128}}}, {big, {{0, 0}, {8, 8}}}}));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Parameters own(session);
  std::vector<rk_target> targets = own.targets();
  targets[1].offset = nullptr;
  const Outcome which = load_into(session, targets);
  EXPECT_EQ(which.code, RK_INVALID);
  EXPECT_THAT(which.message, HasSubstr("3 boxes of 'big'"));
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
}

TEST(LoadInto, TensorsWithoutATargetAreSkipped) {
  const FakeModel model;
  ScriptedAgent server(serving(model));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  std::string small(16 * 32 * 4, '\0');
  EXPECT_EQ(load_into(session, {{"small", nullptr, small.data(), small.size()}}).code, RK_OK);
  EXPECT_TRUE(small == model.bytes_of("small", Box::whole(Shape{16, 32})));
  EXPECT_EQ(rk_loaded(session.handle, nullptr), RK_OK);
}

TEST(LoadInto, WrongTargetsAreNamedAndNothingIsTaken) {
  const FakeModel model;
  ScriptedAgent server(serving(model));
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Parameters own(session);
  const auto refused = [&](const std::function<void(std::vector<rk_target>&)>& spoil) {
    std::vector<rk_target> targets = own.targets();
    spoil(targets);
    return load_into(session, targets);
  };
  const std::uint64_t elsewhere[] = {3, 0};
  const auto big = static_cast<std::size_t>(
      std::find_if(own.tensors.begin(), own.tensors.end(),
                   [](const rk_tensor& t) { return std::string_view(t.name) == "big"; }) -
      own.tensors.begin());
  auto outcome = refused([&](auto& t) { t[big].tensor = "other"; });
  EXPECT_EQ(outcome.code, RK_NOT_FOUND);
  EXPECT_THAT(outcome.message, HasSubstr("'other'"));
  outcome = refused([&](auto& t) { t[big].offset = elsewhere; });
  EXPECT_EQ(outcome.code, RK_NOT_FOUND);
  EXPECT_THAT(outcome.message, HasSubstr("'big' at [3, 0]"));
  outcome = refused([&](auto& t) { t[big].bytes -= 1; });
  EXPECT_EQ(outcome.code, RK_INVALID);
  EXPECT_THAT(outcome.message, HasSubstr("'big' has 2097152 bytes, its target 2097151"));
  outcome = refused([&](auto& t) { t.push_back(t[big]); });
  EXPECT_EQ(outcome.code, RK_INVALID);
  EXPECT_THAT(outcome.message, HasSubstr("two targets"));
  outcome = refused([&](auto& t) { t[big].data = nullptr; });
  EXPECT_EQ(outcome.code, RK_INVALID);
  EXPECT_THAT(outcome.message, HasSubstr("null"));
  EXPECT_EQ(refused([&](auto& t) { t[big].tensor = nullptr; }).code, RK_INVALID);
  EXPECT_EQ(rk_load_into(session.handle, nullptr, 1, 0, nullptr), RK_INVALID);
  EXPECT_EQ(load_into(session, own.targets(), -1).code, RK_INVALID);
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
}

TEST(LoadInto, ATimeOutIsGoneOnFrom) {
  // Tiles of whole rows: their buckets come while the last tile is away.
  const FakeModel model({{"tall", DType::kU8, Shape{1000, 4001}}, {"small", DType::kF32, Shape{9}}},
                        {}, 8 << 20);
  ASSERT_GT(model.end_tile("tall") - model.first_tile("tall"), 2u);
  Gate rest;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.send(attached_for(agent, model, false), model.segments());
    agent.send(model.ready(kSession, model.first_tile("tall"), model.end_tile("tall") - 1));
    agent.answer_pings_until(rest);
    agent.send(model.ready(kSession, 0, model.tiles().tile_count()));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_device(agent);
  Parameters own(session);
  EXPECT_EQ(load_into(session, own.targets(), 100).code, RK_TIMEOUT);
  std::vector<rk_target> others = own.targets();
  std::string another(1000 * 4001, '\0');
  for (rk_target& target : others) {
    if (std::string_view(target.tensor) == "tall") target.data = another.data();
  }
  const Outcome late = load_into(session, others, 0);
  EXPECT_EQ(late.code, RK_INVALID);
  EXPECT_THAT(late.message, HasSubstr("'tall' was handed out before"));
  rest.open();
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
}

TEST(LoadInto, WhoLoadsOfASessionThatIsDetachedIsTold) {
  const FakeModel model;
  Gate begun;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.send(attached_for(agent, model, false), model.segments());
    agent.send(model.ready(kSession, 0, 2));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  Session session = attach_device(agent);
  Parameters own(session);
  std::thread loader([&, handle = session.handle] {
    const std::vector<rk_target> targets = own.targets();
    begun.open();
    EXPECT_EQ(rk_load_into(handle, targets.data(), targets.size(), kPatienceMs, nullptr), RK_STALE);
  });
  begun.wait();
  // The call is inside the library now.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  rk_detach(std::exchange(session.handle, nullptr));
  loader.join();
}

}  // namespace
}  // namespace rekindle::client::testing
