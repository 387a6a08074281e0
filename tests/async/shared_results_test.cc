// Results that several callers share: computed once, on a pool, and kept within limits.
// Computations wait for a gate of the test where their order matters.
#include "src/async/shared_results.h"

#include <atomic>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/this_coro.hpp>
#include <gtest/gtest.h>

namespace rekindle::async {
namespace {

using Text = std::shared_ptr<const std::string>;
using Results = SharedResults<std::string, Text>;

class SharedResultsTest : public ::testing::Test {
 protected:
  struct Caller {
    std::optional<Result<Text>> outcome;
    boost::asio::cancellation_signal cancel;
  };

  void open(Results::Limits limits = {1000, 10, std::chrono::seconds(60)}) {
    results_ = std::make_unique<Results>(context_.get_executor(), *pool_, limits);
  }
  // A computation that counts itself, and waits until the gate is open.
  Results::Compute compute(const std::string& text) {
    return [this, text, gate = gate_opens_]() -> Result<Results::Computed> {
      ++begun_;
      gate.wait();
      return Results::Computed{std::make_shared<const std::string>(text), 1};
    };
  }
  Results::Compute compute_now(const std::string& text, std::uint64_t bytes = 1) {
    return [this, text, bytes]() -> Result<Results::Computed> {
      ++begun_;
      return Results::Computed{std::make_shared<const std::string>(text), bytes};
    };
  }
  void ask(Caller& caller, const std::string& key, Results::Compute with) {
    auto task = [](Results* results, Caller* who, std::string what,
                   Results::Compute how) -> Task<void> {
      co_await boost::asio::this_coro::throw_if_cancelled(false);
      who->outcome = co_await results->get(std::move(what), std::move(how));
    };
    boost::asio::co_spawn(
        context_, task(results_.get(), &caller, key, std::move(with)),
        boost::asio::bind_cancellation_slot(caller.cancel.slot(), boost::asio::detached));
  }
  Result<Text> get(const std::string& key, Results::Compute with) {
    Caller caller;
    ask(caller, key, std::move(with));
    work_until([&] { return caller.outcome.has_value(); });
    return *caller.outcome;
  }
  void work_until(const std::function<bool()>& done) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done() && std::chrono::steady_clock::now() < give_up) {
      context_.restart();
      context_.run_one_for(std::chrono::milliseconds(10));
    }
    ASSERT_TRUE(done());
  }
  void TearDown() override {
    if (!gate_open_) gate_.set_value();
  }
  void open_gate() {
    gate_open_ = true;
    gate_.set_value();
  }

  // The order of destruction: the results, the pool, the context.
  boost::asio::io_context context_;
  std::promise<void> gate_;
  const std::shared_future<void> gate_opens_ = gate_.get_future().share();
  bool gate_open_ = false;
  std::atomic<int> begun_ = 0;
  std::unique_ptr<WorkerPool> pool_ = std::make_unique<WorkerPool>("test", 2, 16);
  std::unique_ptr<Results> results_;
};

TEST_F(SharedResultsTest, EightCallersOfAKeyShareOneComputation) {
  open();
  const auto blocked = compute("a");
  std::vector<Caller> callers(8);
  for (Caller& caller : callers) ask(caller, "a", blocked);
  work_until([&] { return begun_ == 1; });
  // The executor serves others while the pool computes.
  bool served = false;
  boost::asio::post(context_, [&] { served = true; });
  work_until([&] { return served; });
  for (const Caller& caller : callers) EXPECT_FALSE(caller.outcome);
  open_gate();
  work_until([&] {
    return std::ranges::all_of(callers, [](const Caller& c) { return c.outcome.has_value(); });
  });
  for (const Caller& caller : callers) EXPECT_EQ(**caller.outcome, **callers[0].outcome);
  EXPECT_EQ(***callers[0].outcome, "a");
  EXPECT_EQ(begun_, 1);
}

TEST_F(SharedResultsTest, ALaterCallerGetsTheKeptResult) {
  open();
  const auto first = get("a", compute_now("a"));
  const auto second = get("a", compute_now("another"));
  ASSERT_TRUE(first && second);
  EXPECT_EQ(*first, *second);
  EXPECT_EQ(begun_, 1);
}

TEST_F(SharedResultsTest, KeysDoNotShare) {
  open();
  EXPECT_EQ(**get("a", compute_now("one")), "one");
  EXPECT_EQ(**get("b", compute_now("two")), "two");
  EXPECT_EQ(begun_, 2);
}

TEST_F(SharedResultsTest, ACancelledCallerLeavesAtOnceAndTheOthersGetTheResult) {
  open();
  Caller first, second;
  ask(first, "a", compute("a"));
  ask(second, "a", compute("a"));
  work_until([&] { return begun_ == 1; });
  first.cancel.emit(boost::asio::cancellation_type::terminal);
  work_until([&] { return first.outcome.has_value(); });
  EXPECT_EQ(first.outcome->error().code(), ErrorCode::kUnavailable);
  EXPECT_FALSE(second.outcome);
  open_gate();
  work_until([&] { return second.outcome.has_value(); });
  EXPECT_EQ(***second.outcome, "a");
}

TEST_F(SharedResultsTest, WhatACallerThatHasLeftWantedIsKept) {
  open();
  Caller caller;
  ask(caller, "a", compute("a"));
  work_until([&] { return begun_ == 1; });
  caller.cancel.emit(boost::asio::cancellation_type::terminal);
  work_until([&] { return caller.outcome.has_value(); });
  open_gate();
  work_until([&] { return results_->find("a").has_value(); });
  EXPECT_EQ(**results_->find("a"), "a");
}

TEST_F(SharedResultsTest, AFailureReachesItsCallersAndIsNotKept) {
  open();
  const auto failed =
      get("a", [] { return Result<Results::Computed>(fail(ErrorCode::kInvalid, "no")); });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(**get("a", compute_now("a")), "a");
}

TEST_F(SharedResultsTest, AComputationThatThrowsFails) {
  open();
  const auto failed = get("a", []() -> Result<Results::Computed> { throw std::bad_alloc(); });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code(), ErrorCode::kInternal);
}

TEST_F(SharedResultsTest, TheLeastRecentlyUsedGoesFirst) {
  open({100, 10, std::chrono::seconds(60)});
  (void)get("a", compute_now("a", 40));
  (void)get("b", compute_now("b", 40));
  EXPECT_TRUE(results_->find("a"));
  (void)get("c", compute_now("c", 40));
  EXPECT_TRUE(results_->find("a"));
  EXPECT_FALSE(results_->find("b"));
  EXPECT_TRUE(results_->find("c"));
  EXPECT_EQ(results_->kept_bytes(), 80u);
}

TEST_F(SharedResultsTest, TheNumberOfResultsIsBoundedAsWell) {
  open({100, 2, std::chrono::seconds(60)});
  for (const char* key : {"a", "b", "c"}) (void)get(key, compute_now(key, 0));
  EXPECT_EQ(results_->kept(), 2u);
  EXPECT_FALSE(results_->find("a"));
}

TEST_F(SharedResultsTest, AResultAboveTheLimitServesItsCallersAndIsNotKept) {
  open({100, 10, std::chrono::seconds(60)});
  (void)get("small", compute_now("small", 10));
  EXPECT_EQ(**get("large", compute_now("large", 101)), "large");
  EXPECT_FALSE(results_->find("large"));
  EXPECT_TRUE(results_->find("small"));
}

TEST_F(SharedResultsTest, ACallerDoesNotWaitForeverForThePool) {
  open({100, 10, std::chrono::milliseconds(1)});
  const auto outcome = get("a", compute("a"));
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code(), ErrorCode::kTimeout);
}

TEST_F(SharedResultsTest, AFullQueueIsAnErrorAndNotAWait) {
  pool_ = std::make_unique<WorkerPool>("test", 1, 1);
  open();
  const auto blocked = compute("a");
  Caller runs, waits, refused;
  ask(runs, "a", blocked);
  work_until([&] { return begun_ == 1; });
  ask(waits, "b", blocked);
  ask(refused, "c", blocked);
  work_until([&] { return refused.outcome.has_value(); });
  EXPECT_EQ(refused.outcome->error().code(), ErrorCode::kExhausted);
  open_gate();
  work_until([&] { return runs.outcome && waits.outcome; });
  EXPECT_TRUE(get("c", blocked)) << "a later call is a new one";
}

TEST_F(SharedResultsTest, ComputationsOutliveTheObjectAndThoseThatHaveNotBegunAreLeftOut) {
  pool_ = std::make_unique<WorkerPool>("test", 1, 16);
  open();
  const auto blocked = compute("a");
  Caller runs, waits;
  ask(runs, "a", blocked);
  work_until([&] { return begun_ == 1; });
  ask(waits, "b", blocked);
  work_until([&] { return context_.poll() == 0; });
  results_.reset();
  open_gate();
  work_until([&] { return runs.outcome && waits.outcome; });
  EXPECT_TRUE(*runs.outcome);
  EXPECT_FALSE(*waits.outcome);
  EXPECT_EQ(begun_, 1);
}

}  // namespace
}  // namespace rekindle::async
