#include "src/async/staggered.h"

#include <stdexcept>

#include <gtest/gtest.h>

#include "tests/recovery/rpc_fixture.h"

// Tasks that begin one after the other, until one has succeeded.
namespace rekindle::async {
namespace {

using namespace std::chrono_literals;
constexpr Duration kNeverAlone = 1h;

Task<Result<int>> give(int value, int& began) {
  ++began;
  co_return value;
}
Task<Result<int>> fail_with(ErrorCode code, int& began) {
  ++began;
  co_return fail(code, "no");
}
Task<Result<int>> hang(int& began, int& ended) {
  ++began;
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  co_await sleep_for(1h);
  ++ended;
  co_return fail(ErrorCode::kUnavailable, "cancelled");
}
Task<Result<int>> fall_over(int& began) {
  ++began;
  co_await sleep_for(1ms);
  throw std::runtime_error("a bug");
}

class Staggered : public ::testing::Test {
 protected:
  template <typename... Tasks>
  FirstResult<int> run(Duration head_start, Tasks... tasks) {
    std::vector<Task<Result<int>>> all;
    (all.push_back(std::move(tasks)), ...);
    return loop_.run(staggered<int>(std::move(all), head_start));
  }
  rpc::testing::Loop loop_;
  int began_ = 0;
  int ended_ = 0;
};

TEST_F(Staggered, AQuickTaskRunsAlone) {
  const auto first = run(kNeverAlone, give(7, began_), give(8, began_));
  EXPECT_EQ(first.value, 7);
  EXPECT_EQ(first.winner, 0u);
  EXPECT_EQ(began_, 1);
}

TEST_F(Staggered, ATaskThatHangsIsOvertakenAndCancelled) {
  const auto first = run(10ms, hang(began_, ended_), hang(began_, ended_), give(3, began_));
  EXPECT_EQ(first.value, 3);
  EXPECT_EQ(first.winner, 2u);
  EXPECT_EQ(began_, 3);
  EXPECT_EQ(ended_, 2) << "none of them runs on";
  EXPECT_FALSE(first.errors[0] || first.errors[1]) << "none of them has failed by itself";
}

TEST_F(Staggered, AfterAFailureTheNextTaskBeginsAtOnce) {
  const auto first = run(kNeverAlone, fail_with(ErrorCode::kTimeout, began_), fall_over(began_),
                         give(5, began_), give(6, began_));
  EXPECT_EQ(first.value, 5);
  EXPECT_EQ(began_, 3);
  ASSERT_TRUE(first.errors[0] && first.errors[1]);
  EXPECT_EQ(first.errors[0]->code(), ErrorCode::kTimeout);
  EXPECT_EQ(first.errors[1]->code(), ErrorCode::kInternal);
}

TEST_F(Staggered, WhenAllFailThereIsNoValue) {
  const auto none = run(kNeverAlone, fail_with(ErrorCode::kTimeout, began_),
                        fail_with(ErrorCode::kCorrupt, began_));
  EXPECT_FALSE(none.value);
  EXPECT_EQ(none.errors[1]->code(), ErrorCode::kCorrupt);
  EXPECT_FALSE(run(kNeverAlone).value) << "there is nothing to run";
}

TEST_F(Staggered, ACancelledCallerReturnsWhenItsTasksHaveEnded) {
  TaskGroup callers(loop_.executor());
  bool returned = false;
  const auto call = [](int& began, int& ended, bool& done) -> Task<void> {
    std::vector<Task<Result<int>>> all;
    all.push_back(hang(began, ended));
    auto racing = staggered<int>(std::move(all), kNeverAlone);
    const auto first = co_await std::move(racing);
    done = !first.value;
  };
  callers.spawn("caller", call(began_, ended_, returned));
  loop_.run_until([&] { return began_ == 1; });
  callers.cancel();
  loop_.run_until([&] { return returned; });
  EXPECT_EQ(ended_, 1);
}

}  // namespace
}  // namespace rekindle::async
