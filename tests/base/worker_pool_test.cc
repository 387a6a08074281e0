#include "src/base/worker_pool.h"

#include <atomic>
#include <latch>

#include <gtest/gtest.h>

namespace rekindle {
namespace {

TEST(WorkerPoolTest, ParallelForRunsEachIndexOnce) {
  WorkerPool pool("test", 4, 2);
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1000}}) {
    std::vector<std::atomic<int>> runs(count);
    pool.parallel_for(count, [&](std::size_t i) { ++runs[i]; });
    for (const auto& run : runs) EXPECT_EQ(run, 1);
  }
}

TEST(WorkerPoolTest, TheDestructorRunsWhatIsQueued) {
  std::atomic<int> ran = 0;
  {
    WorkerPool pool("test", 1, 100);
    for (int i = 0; i < 50; ++i) pool.submit([&] { ++ran; });
  }
  EXPECT_EQ(ran, 50);
}

TEST(WorkerPoolTest, TheQueueIsBounded) {
  std::latch started(1);
  std::latch release(1);
  WorkerPool pool("test", 1, 2);
  pool.submit([&] {
    started.count_down();
    release.wait();
  });
  started.wait();
  EXPECT_TRUE(pool.try_submit([] {}));
  EXPECT_TRUE(pool.try_submit([] {}));
  EXPECT_FALSE(pool.try_submit([] {}));
  release.count_down();
}

}  // namespace
}  // namespace rekindle
