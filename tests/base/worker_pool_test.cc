#include "src/base/worker_pool.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <latch>
#include <memory>
#include <optional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle {
namespace {

using ::testing::ElementsAre;

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

std::vector<int> cpus(int first, int count) {
  std::vector<int> list;
  for (int i = 0; i < count; ++i) list.push_back(first + i);
  return list;
}

std::vector<NumaNode> two_nodes() {
  return {{0, cpus(0, 32), true, {}}, {1, cpus(32, 32), true, {}}};
}

TEST(WorkerGroupsTest, ThreadsAreSplitByCpus) {
  const auto nodes = two_nodes();
  EXPECT_THAT(worker_groups(nodes, cpus(0, 64), 48),
              ElementsAre(WorkerGroup{24, 0, cpus(0, 32)}, WorkerGroup{24, 1, cpus(32, 32)}));
  // A cpuset leaves 8 CPUs of node 0 and 24 of node 1.
  EXPECT_THAT(worker_groups(nodes, cpus(24, 32), 24),
              ElementsAre(WorkerGroup{6, 0, cpus(24, 8)}, WorkerGroup{18, 1, cpus(32, 24)}));
  // No thread is lost by rounding.
  for (std::size_t threads = 2; threads < 100; ++threads) {
    std::size_t sum = 0;
    for (const auto& group : worker_groups(nodes, cpus(11, 40), threads)) sum += group.threads;
    EXPECT_EQ(sum, threads);
  }
}

TEST(WorkerGroupsTest, OneNodeIsNotPinned) {
  const WorkerGroup anywhere{7, -1, {}};
  EXPECT_THAT(worker_groups({}, cpus(0, 8), 7), ElementsAre(anywhere));
  EXPECT_THAT(worker_groups(std::vector<NumaNode>{{0, cpus(0, 8), true, {}}}, cpus(0, 8), 7),
              ElementsAre(anywhere));
  // Memory of a GPU is a node, but has no CPUs.
  EXPECT_THAT(worker_groups(std::vector<NumaNode>{{0, cpus(0, 8), true, {}}, {1, {}, true, {}}},
                            cpus(0, 8), 7),
              ElementsAre(anywhere));
  // The cpuset has CPUs of one node only, or nobody knows of which.
  EXPECT_THAT(worker_groups(two_nodes(), cpus(32, 4), 7), ElementsAre(anywhere));
  EXPECT_THAT(worker_groups(two_nodes(), {}, 7), ElementsAre(anywhere));
  EXPECT_THAT(worker_groups(two_nodes(), cpus(0, 64), 1), ElementsAre(WorkerGroup{1, -1, {}}));
}

std::vector<WorkerGroup> one_thread_on_each_of_two_nodes() { return {{1, 0, {}}, {1, 1, {}}}; }

// Keeps both threads of such a pool busy until release().
class BothBusy {
 public:
  explicit BothBusy(WorkerPool& pool) {
    for (int i = 0; i < 2; ++i) {
      pool.submit([this] {
        busy_.count_down();
        release_.wait();
        left_.count_down();
      });
    }
    busy_.wait();
  }
  // A thread may still read `release_` while the other one runs everything that is queued.
  ~BothBusy() { left_.wait(); }
  void release() { release_.count_down(); }

 private:
  std::latch busy_{2};
  std::latch release_{1};
  std::latch left_{2};
};

TEST(WorkerPoolTest, AJobRunsOnTheThreadsOfItsNode) {
  WorkerPool pool("test", one_thread_on_each_of_two_nodes(), 10);
  std::optional<std::thread::id> thread_of[2];
  for (int round = 0; round < 20; ++round) {
    BothBusy busy(pool);
    // Each job waits for the other one, so both threads take one.
    std::latch both(2);
    std::latch ended(2);
    std::thread::id seen[2];
    const int first = round / 2 % 2;  // a pool that takes the nodes in turn would be found out
    for (const int node : {first, 1 - first}) {
      ASSERT_TRUE(pool.try_submit(
          [&, node] {
            seen[node] = std::this_thread::get_id();
            both.arrive_and_wait();
            ended.count_down();
          },
          node));
    }
    // Without a node: whoever has time.
    std::latch last(1);
    pool.submit([&] { last.count_down(); });
    busy.release();
    last.wait();
    ended.wait();
    EXPECT_NE(seen[0], seen[1]);
    for (const int node : {0, 1}) {
      EXPECT_EQ(thread_of[node].value_or(seen[node]), seen[node]) << "round " << round;
      thread_of[node] = seen[node];
    }
  }
}

TEST(WorkerPoolTest, AnIdleNodeHelpsABusyOne) {
  WorkerPool pool("test", one_thread_on_each_of_two_nodes(), 100);
  for (const int node : {0, 1}) {
    // Ends only if the thread of the other node takes one of the two.
    std::latch both(2);
    std::latch ended(2);
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(pool.try_submit(
          [&] {
            both.arrive_and_wait();
            ended.count_down();
          },
          node));
    }
    ended.wait();
  }
}

TEST(WorkerPoolTest, ALongQueueOfOneNodeKeepsAllThreadsBusy) {
  constexpr int kRounds = 200;
  WorkerPool pool("test", std::vector<WorkerGroup>{{2, 0, {}}, {2, 1, {}}}, kRounds * 4);
  // Each four jobs need all four threads at the same time.
  std::vector<std::unique_ptr<std::latch>> four;
  std::latch ended(kRounds * 4);
  for (int i = 0; i < kRounds; ++i) four.push_back(std::make_unique<std::latch>(4));
  for (int i = 0; i < kRounds * 4; ++i) {
    ASSERT_TRUE(pool.try_submit(
        [&, i] {
          four[static_cast<std::size_t>(i / 4)]->arrive_and_wait();
          ended.count_down();
        },
        1));
  }
  ended.wait();
}

TEST(WorkerPoolTest, AnUnknownNodeIsNoHint) {
  std::atomic<int> ran = 0;
  {
    WorkerPool pool("test", one_thread_on_each_of_two_nodes(), 100);
    for (const int node : {-1, 7, 1000}) {
      EXPECT_TRUE(pool.try_submit([&] { ++ran; }, node));
    }
  }
  EXPECT_EQ(ran, 3);
}

TEST(WorkerPoolTest, TheDestructorRunsWhatIsQueuedForEachNode) {
  std::atomic<int> ran = 0;
  {
    WorkerPool pool("test", one_thread_on_each_of_two_nodes(), 200);
    BothBusy busy(pool);
    for (int i = 0; i < 150; ++i) ASSERT_TRUE(pool.try_submit([&] { ++ran; }, i % 3 - 1));
    EXPECT_EQ(ran, 0);
    busy.release();
  }
  EXPECT_EQ(ran, 150);
}

TEST(WorkerPoolTest, TheBoundIsThatOfAllQueues) {
  WorkerPool pool("test", one_thread_on_each_of_two_nodes(), 2);
  BothBusy busy(pool);
  EXPECT_TRUE(pool.try_submit([] {}, 0));
  EXPECT_TRUE(pool.try_submit([] {}, 1));
  EXPECT_FALSE(pool.try_submit([] {}, 0));
  EXPECT_FALSE(pool.try_submit([] {}, 1));
  busy.release();
}

TEST(WorkerPoolTest, ThreadsKeepToTheCpusOfTheirGroup) {
  const auto allowed = allowed_cpus();
  ASSERT_FALSE(allowed.empty());
  const std::vector<int> first = {allowed.front()};
  const std::vector<int> last = {allowed.back()};
  WorkerPool pool("test", std::vector<WorkerGroup>{{1, 0, first}, {1, 1, last}}, 10);
  std::latch both(2);
  std::latch ended(2);
  std::vector<int> seen[2];
  {
    BothBusy busy(pool);
    for (const int node : {1, 0}) {
      ASSERT_TRUE(pool.try_submit(
          [&, node] {
            seen[node] = allowed_cpus();
            both.arrive_and_wait();
            ended.count_down();
          },
          node));
    }
    busy.release();
    ended.wait();
  }
  EXPECT_EQ(seen[0], first);
  EXPECT_EQ(seen[1], last);
  EXPECT_EQ(allowed_cpus(), allowed) << "that of the caller stays";
}

TEST(WorkerPoolTest, OnThisHostThreadsKeepToTheCpusOfTheirNode) {
  const auto allowed = allowed_cpus();
  for (const NumaNode& node : usable_numa_nodes()) {
    std::vector<int> expected;
    std::ranges::set_intersection(node.cpus, allowed, std::back_inserter(expected));
    if (expected.empty()) continue;
    WorkerPool pool("test", std::vector<WorkerGroup>{{1, node.id, node.cpus}}, 10);
    std::vector<int> seen;
    pool.parallel_for(1, [&](std::size_t) { seen = allowed_cpus(); });
    EXPECT_EQ(seen, expected) << "node " << node.id;
  }
  // The groups that an agent makes.
  for (const WorkerGroup& group : worker_groups(usable_numa_nodes(), allowed, 2)) {
    WorkerPool pool("test", std::vector<WorkerGroup>{group}, 10);
    std::vector<int> seen;
    pool.parallel_for(1, [&](std::size_t) { seen = allowed_cpus(); });
    EXPECT_EQ(seen, group.cpus.empty() ? allowed : group.cpus);
  }
}

}  // namespace
}  // namespace rekindle
