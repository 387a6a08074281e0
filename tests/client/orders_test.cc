// Orders of an agent to a worker.
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/worker.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using Kind = proto::WorkerFrame;

rk_order an_order() {
  rk_order order{};
  order.size = sizeof order;
  return order;
}

proto::AgentFrame to_serve(std::uint64_t number, const std::string& model, std::uint64_t version) {
  proto::AgentFrame frame;
  frame.mutable_order()->set_number(number);
  frame.mutable_order()->mutable_serve()->set_model(model);
  frame.mutable_order()->mutable_serve()->set_latest(version == 0);
  frame.mutable_order()->mutable_serve()->set_version(version);
  return frame;
}

class Orders : public ::testing::Test {
 protected:
  const FakeModel model_;
};

TEST_F(Orders, AWorkerGetsThemOneByOneAndAnswersEach) {
  Gate nothing_yet;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model_, true);
    const auto asked = agent.expect(Kind::kWatchOrders);
    nothing_yet.wait();
    agent.answer(asked, to_serve(5, "b", 2));
    auto result = agent.expect(Kind::kOrderResult);
    EXPECT_EQ(result.session(), asked.session());
    EXPECT_EQ(result.order_result().order(), 5u);
    EXPECT_FALSE(result.order_result().has_error());
    ASSERT_EQ(result.order_result().phases_size(), 1);
    EXPECT_EQ(result.order_result().phases(0).name(), "load");
    EXPECT_EQ(result.order_result().phases(0).elapsed_us(), 70u);
    proto::AgentFrame done;
    done.mutable_done();
    agent.answer(result, done);
    proto::AgentFrame damaged;
    damaged.mutable_order()->set_number(6);
    damaged.mutable_order()->mutable_damaged()->add_tensors("w");
    agent.answer(agent.expect(Kind::kWatchOrders), damaged);
    result = agent.expect(Kind::kOrderResult);
    EXPECT_EQ(result.order_result().error().code(), proto::STATUS_CORRUPT);
    EXPECT_EQ(result.order_result().error().message(), "it is w");
    agent.fail(result, proto::STATUS_STALE, "no order 6");
    agent.answer(agent.expect(Kind::kWatchOrders), to_serve(7, "c", 0));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  rk_error error{};
  rk_order order = an_order();
  EXPECT_EQ(rk_watch_order(session.handle, 0, &order, &error), RK_TIMEOUT);
  nothing_yet.open();
  ASSERT_EQ(rk_watch_order(session.handle, kPatienceMs, &order, &error), RK_OK) << error.message;
  EXPECT_EQ(order.size, sizeof order);
  EXPECT_EQ(order.kind, static_cast<std::uint32_t>(RK_ORDER_SERVE));
  EXPECT_STREQ(order.model, "b@2");
  const rk_phase load{"load", 70};
  EXPECT_EQ(rk_order_done(session.handle, order.number, RK_OK, nullptr, &load, 1, &error), RK_OK)
      << error.message;

  ASSERT_EQ(rk_watch_order(session.handle, kPatienceMs, &order, &error), RK_OK) << error.message;
  EXPECT_EQ(order.kind, static_cast<std::uint32_t>(RK_ORDER_MEND));
  ASSERT_EQ(order.tensor_count, 1u);
  EXPECT_STREQ(order.tensors[0], "w");
  EXPECT_EQ(rk_order_done(session.handle, 6, RK_CORRUPT, "it is w", nullptr, 0, &error), RK_STALE);
  ASSERT_EQ(rk_watch_order(session.handle, kPatienceMs, &order, &error), RK_OK) << error.message;
  EXPECT_STREQ(order.model, "c") << "the newest version";
}

TEST_F(Orders, AnEndedSessionGetsNoneAndStillAnswersTheLast) {
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model_, true);
    const auto asked = agent.expect(Kind::kWatchOrders);
    agent.answer(asked, to_serve(5, "b", 2));
    agent.end_session(asked.session(), proto::STATUS_STALE, "attached anew");
    // The worker may ask for one more order before it reads that the session has ended.
    auto result = agent.receive();
    while (result && result->kind_case() == Kind::kWatchOrders) result = agent.receive();
    ASSERT_TRUE(result && result->kind_case() == Kind::kOrderResult);
    proto::AgentFrame done;
    done.mutable_done();
    agent.answer(*result, done);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  rk_error error{};
  rk_order order = an_order();
  ASSERT_EQ(rk_watch_order(session.handle, kPatienceMs, &order, &error), RK_OK) << error.message;
  while (rk_watch_order(session.handle, 10, &order, &error) == RK_TIMEOUT) {
  }
  EXPECT_THAT(error.message, HasSubstr("attached anew"));
  EXPECT_EQ(rk_order_done(session.handle, 5, RK_OK, nullptr, nullptr, 0, &error), RK_OK)
      << error.message;
}

TEST_F(Orders, AnAgentThatGivesNoneSaysSo) {
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.gives_orders = false;
    agent.attach(model_, true);
    for (const auto& frame : agent.until_closed()) {
      EXPECT_NE(frame.kind_case(), Kind::kWatchOrders) << "it would close the connection";
    }
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  rk_error error{};
  rk_order order = an_order();
  EXPECT_EQ(rk_watch_order(session.handle, kPatienceMs, &order, &error), RK_UNAVAILABLE);
  EXPECT_THAT(error.message, HasSubstr("gives no orders"));
}

TEST_F(Orders, WhatIsWrongAsksNobody) {
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model_, true);
    for (const auto& frame : agent.until_closed()) {
      EXPECT_NE(frame.kind_case(), Kind::kWatchOrders);
      EXPECT_NE(frame.kind_case(), Kind::kOrderResult);
    }
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  rk_order order = an_order();
  order.size = 0;
  EXPECT_EQ(rk_watch_order(session.handle, 0, &order, nullptr), RK_INVALID);
  EXPECT_EQ(rk_watch_order(session.handle, 0, nullptr, nullptr), RK_INVALID);
  EXPECT_EQ(rk_watch_order(session.handle, -1, &order, nullptr), RK_INVALID);
  EXPECT_EQ(rk_order_done(session.handle, 5, 99, "", nullptr, 0, nullptr), RK_INVALID);
  EXPECT_EQ(rk_order_done(session.handle, 5, RK_OK, "", nullptr, 1, nullptr), RK_INVALID);
}

}  // namespace
}  // namespace rekindle::client::testing
