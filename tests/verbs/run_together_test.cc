#include <array>
#include <atomic>
#include <barrier>
#include <system_error>

#include <gmock/gmock.h>

#include "transport/verbs/link/verbs_connection.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::Each;

TEST(RunTogether, AllRunAtOnce) {
  constexpr std::size_t kCount = 8;
  std::barrier all(kCount);
  std::array<int, kCount> runs{};
  run_together(kCount, [&](std::size_t i) {
    all.arrive_and_wait();  // for ever, if one of them came later
    ++runs[i];
  });
  EXPECT_THAT(runs, Each(1));
}

TEST(RunTogether, NothingAndOnePieceOfWorkNeedNoThread) {
  const StartThread none = [](auto) -> std::future<void> {
    throw std::logic_error("a thread was started");
  };
  run_together(
      0, [](std::size_t) { FAIL(); }, none);
  int runs = 0;
  run_together(
      1, [&](std::size_t) { ++runs; }, none);
  EXPECT_EQ(runs, 1);
}

TEST(RunTogether, WhatNoThreadCanBeHadForIsDoneAllTheSame) {
  for (std::size_t threads = 0; threads < 4; ++threads) {
    std::size_t left = threads;
    const StartThread few = [&](std::function<void()> work) {
      if (left == 0) throw std::system_error(EAGAIN, std::generic_category(), "pthread_create");
      --left;
      return start_thread(std::move(work));
    };
    std::array<std::atomic<int>, 4> runs{};
    run_together(
        runs.size(), [&](std::size_t i) { ++runs[i]; }, few);
    for (const auto& count : runs) EXPECT_EQ(count, 1) << threads;
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
