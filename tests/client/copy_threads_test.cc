// Threads that copy, from inside the library.
#include "src/client/copy_threads.h"

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include <gtest/gtest.h>

namespace rekindle::client {
namespace {

using namespace std::chrono_literals;

TEST(CopyThreads, EachOfTwoClosersReturnsOnlyWhenNoCopyRuns) {
  std::promise<void> begun;
  std::promise<void> returned;
  std::atomic<bool> copies = false;
  std::atomic_flag has_returned;
  CopyThreads threads(1, [&](const Copy&) {
    copies = true;
    begun.set_value();
    // Long enough for a closer that does not wait.
    (void)returned.get_future().wait_for(200ms);
    copies = false;
  });
  std::array<std::byte, 64> source{};
  std::array<std::byte, 64> target{};
  const Copy copy{target.data(), source.data(), source.size()};
  ASSERT_TRUE(threads.put({&copy, 1}));
  ASSERT_EQ(begun.get_future().wait_for(20s), std::future_status::ready);
  const auto close = [&] {
    threads.close();
    EXPECT_FALSE(copies);
    if (!has_returned.test_and_set()) returned.set_value();
  };
  std::thread other(close);
  close();
  other.join();
}

}  // namespace
}  // namespace rekindle::client
