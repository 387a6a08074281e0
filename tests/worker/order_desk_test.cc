#include <gtest/gtest.h>

#include "tests/worker/worker_service_fixture.h"

namespace rekindle::worker {
namespace {

class OrderDeskTest : public WorkerServiceTest {
 protected:
  using Given = std::future<Result<OrderDesk::Results>>;
  // To the workers of an instance.
  Given give(const std::string& instance, Duration patience = 20s) {
    const auto run = [](WorkerService& service, std::string name,
                        Duration wait) -> async::Task<Result<OrderDesk::Results>> {
      proto::Order order;
      order.mutable_serve()->set_model("b");
      auto given =
          service.orders().give(service.sessions_of(name), std::move(order), steady_now() + wait);
      co_return co_await std::move(given);
    };
    auto task = run(*service_, instance, patience);
    return boost::asio::co_spawn(context_, std::move(task), boost::asio::use_future);
  }
  static std::uint64_t ask(Raw& raw, std::uint64_t session) {
    proto::WorkerFrame frame;
    frame.set_session(session);
    frame.mutable_watch_orders();
    return raw.send(frame);
  }
  static proto::AgentFrame say(Raw& raw, std::uint64_t session, std::uint64_t order,
                               proto::StatusCode code = proto::STATUS_OK) {
    proto::WorkerFrame frame;
    frame.set_session(session);
    frame.mutable_order_result()->set_order(order);
    frame.mutable_order_result()->add_phases()->set_name("load");
    if (code != proto::STATUS_OK) frame.mutable_order_result()->mutable_error()->set_code(code);
    return raw.answer(raw.send(frame));
  }
};

TEST_F(OrderDeskTest, AllRanksGetAnOrderWhenTheLastOfThemAsks) {
  Raw first = greeted();
  Raw second = greeted();
  const auto one = first.attach("i", 0, 2).session();
  const auto two = second.attach("i", 1, 2).session();
  auto given = give("i");
  const auto asked = ask(first, one);
  // The service answers in order, so no order came before this answer.
  (void)first.ping();
  EXPECT_TRUE(std::ranges::none_of(first.events, [](const auto& f) { return f.has_order(); }));
  const auto also = ask(second, two);
  const auto order = first.answer(asked);
  ASSERT_TRUE(order.has_order());
  EXPECT_EQ(order.order().serve().model(), "b");
  const auto other = second.answer(also);
  ASSERT_TRUE(other.has_order());
  EXPECT_NE(other.order().number(), order.order().number());
  EXPECT_EQ(say(second, two, order.order().number()).error().code(), proto::STATUS_STALE)
      << "an order of another worker";
  EXPECT_TRUE(say(first, one, order.order().number()).has_done());
  EXPECT_EQ(say(first, one, order.order().number()).error().code(), proto::STATUS_STALE) << "again";
  EXPECT_TRUE(say(second, two, other.order().number(), proto::STATUS_NOT_FOUND).has_done());
  const auto results = given.get();
  ASSERT_TRUE(results) << results.error().message();
  ASSERT_EQ(results->size(), 2u);
  ASSERT_TRUE(results->at(0));
  EXPECT_EQ(results->at(0)->phases(0).name(), "load");
  EXPECT_EQ(results->at(1).error().code(), ErrorCode::kNotFound);
}

TEST_F(OrderDeskTest, AWorkerThatNeverAsksGetsNone) {
  Raw raw = greeted();
  const auto session = raw.attach("i").session();
  const auto nobody = give("i", 1ms).get();
  ASSERT_FALSE(nobody);
  EXPECT_EQ(nobody.error().code(), ErrorCode::kTimeout);
  EXPECT_NE(nobody.error().message().find("rank 0 of i"), std::string::npos);
  // The order is gone.
  ask(raw, session);
  (void)raw.ping();
  EXPECT_TRUE(std::ranges::none_of(raw.events, [](const auto& f) { return f.has_order(); }));
}

TEST_F(OrderDeskTest, AnOrderWithoutAnAnswerHoldsUpTheNextUntilTheAnswer) {
  Raw raw = greeted();
  const auto session = raw.attach("i").session();
  auto asked = ask(raw, session);
  (void)raw.ping();
  auto given = give("i", 1ms);
  auto order = raw.answer(asked);
  auto results = given.get();
  ASSERT_TRUE(results);
  EXPECT_EQ(results->at(0).error().code(), ErrorCode::kTimeout);
  asked = ask(raw, session);
  const auto refused = give("i").get();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_TRUE(say(raw, session, order.order().number()).has_done()) << "late";
  given = give("i");
  order = raw.answer(asked);
  EXPECT_TRUE(say(raw, session, order.order().number()).has_done());
  EXPECT_TRUE(given.get()->at(0));
}

TEST_F(OrderDeskTest, AWorkerThatDiesIsAnError) {
  auto raw = std::make_unique<Raw>(greeted());
  const auto session = raw->attach("i").session();
  auto given = give("i");
  (void)raw->answer(ask(*raw, session));
  raw.reset();
  const auto results = given.get();
  ASSERT_TRUE(results);
  EXPECT_EQ(results->at(0).error().code(), ErrorCode::kPeerLost);
}

TEST_F(OrderDeskTest, ASessionThatEndsBeforeItsOrderGetsNone) {
  Raw raw = greeted();
  const auto session = raw.attach("i").session();
  auto given = give("i");
  // After its answer the order waits: the service runs both in the order of their arrival.
  (void)raw.ping();
  (void)raw.detach(session);
  const auto nobody = given.get();
  ASSERT_FALSE(nobody);
  EXPECT_EQ(nobody.error().code(), ErrorCode::kStale);
}

TEST_F(OrderDeskTest, AnOrderIsAnsweredAlsoWhenItsSessionHasEnded) {
  Raw raw = greeted();
  const auto session = raw.attach("i").session();
  auto given = give("i");
  const auto order = raw.answer(ask(raw, session));
  (void)raw.attach("i");
  EXPECT_TRUE(say(raw, session, order.order().number()).has_done());
  EXPECT_TRUE(given.get()->at(0));
}

}  // namespace
}  // namespace rekindle::worker
