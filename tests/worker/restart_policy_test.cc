#include "recovery/worker/core/restart_policy.h"

#include <gtest/gtest.h>

namespace rekindle::worker {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kStart{1000s};

RestartPolicy policy(const RestartOptions& options, double chance = 0.5) {
  return RestartPolicy(options, [chance] { return chance; });
}

TEST(RestartPolicyTest, TheFirstFailureRestartsAtOnceThenTheDelayDoubles) {
  auto restarts = policy({.first_delay = 100ms, .longest_delay = 450ms, .crash_loop = 0});
  for (const auto expected : {0ms, 100ms, 200ms, 400ms, 450ms, 450ms}) {
    const auto decision = restarts.failed(kStart, kStart + 1s);
    EXPECT_TRUE(decision.restart);
    EXPECT_EQ(decision.delay, expected);
  }
}

TEST(RestartPolicyTest, ALongRunForgetsWhatWasBefore) {
  auto restarts = policy({.healthy_after = 60s, .crash_loop = 3});
  (void)restarts.failed(kStart, kStart + 1s);
  (void)restarts.failed(kStart, kStart + 1s);
  const auto decision = restarts.failed(kStart, kStart + 60s);
  EXPECT_TRUE(decision.restart);
  EXPECT_EQ(decision.delay, 0ms);
  EXPECT_EQ(decision.failures, 1);
}

TEST(RestartPolicyTest, ACrashLoopEndsIt) {
  auto restarts = policy({.healthy_after = 60s, .crash_loop = 3});
  EXPECT_TRUE(restarts.failed(kStart, kStart + 59s).restart);
  EXPECT_TRUE(restarts.failed(kStart, kStart + 59s).restart);
  const auto decision = restarts.failed(kStart, kStart + 59s);
  EXPECT_FALSE(decision.restart);
  EXPECT_EQ(decision.failures, 3);
}

TEST(RestartPolicyTest, JitterSpreadsTheDelayBothWaysAndKeepsTheLimit) {
  const RestartOptions options{.first_delay = 1000ms, .longest_delay = 1100ms, .jitter = 0.2};
  const auto second = [&](double chance) {
    auto restarts = policy(options, chance);
    (void)restarts.failed(kStart, kStart);
    return restarts.failed(kStart, kStart).delay;
  };
  EXPECT_EQ(second(0.0), 800ms);
  EXPECT_EQ(second(0.5), 1000ms);
  EXPECT_EQ(second(0.999999), 1100ms);
}

TEST(RestartPolicyTest, ManyFailuresDoNotOverflow) {
  auto restarts = policy({.first_delay = 100ms, .longest_delay = 30s, .crash_loop = 0});
  for (int i = 0; i < 10'000; ++i) {
    const auto decision = restarts.failed(kStart, kStart);
    ASSERT_TRUE(decision.restart);
    ASSERT_GE(decision.delay, 0ms);
    ASSERT_LE(decision.delay, 30s);
  }
}

}  // namespace
}  // namespace rekindle::worker
