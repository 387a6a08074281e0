#include "transport/registry.h"

#include <array>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace rekindle::transport {
namespace {

std::array<std::byte, 64> g_bytes;

RegionKey add_region(SegmentRegistry& registry, std::shared_ptr<const void> keep_alive = nullptr) {
  return registry.add(g_bytes, -1, 0, {}, std::move(keep_alive));
}

Session session_for(std::vector<RegionKey> regions) {
  return {.token = SessionToken::random(), .puller = "test", .regions = std::move(regions)};
}

TEST(SegmentRegistry, Row5RegionIdsAreReusedOnlyUnderANewGeneration) {
  SegmentRegistry registry;
  std::set<RegionKey> seen;
  std::set<std::uint32_t> ids;
  for (int i = 0; i < 100; ++i) {
    const RegionKey a = add_region(registry);
    const RegionKey b = add_region(registry);
    EXPECT_TRUE(seen.insert(a).second);
    EXPECT_TRUE(seen.insert(b).second);
    ids.insert(a.region);
    ids.insert(b.region);
    registry.remove(a);
    registry.remove(b);
  }
  EXPECT_EQ(ids.size(), 2u);
}

TEST(SegmentRegistry, ARemovedKeyIsStaleAndItsSuccessorIsNot) {
  SegmentRegistry registry;
  const RegionKey old_key = add_region(registry);
  registry.remove(old_key);
  const RegionKey new_key = add_region(registry);
  ASSERT_EQ(old_key.region, new_key.region);
  EXPECT_EQ(registry.lookup(old_key).error().code(), ErrorCode::kStale);
  EXPECT_TRUE(registry.lookup(new_key).has_value());
  registry.remove(old_key);  // again: must not take the successor down
  EXPECT_TRUE(registry.lookup(new_key).has_value());
}

TEST(SegmentRegistry, UnknownRegionsAreStale) {
  SegmentRegistry registry;
  EXPECT_EQ(registry.lookup({7, 1}).error().code(), ErrorCode::kStale);
  const RegionKey key = add_region(registry);
  EXPECT_EQ(registry.lookup({key.region, key.generation + 1}).error().code(), ErrorCode::kStale);
  EXPECT_EQ(registry.lookup({key.region, 0}).error().code(), ErrorCode::kStale);
}

TEST(SegmentRegistry, MemoryIsReleasedOnlyAfterTheLastReaderLetGo) {
  SegmentRegistry registry;
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = memory;
  const RegionKey key = add_region(registry, std::move(memory));
  EXPECT_EQ(registry.reader_count(key), 0u);
  auto first = registry.lookup(key).value();
  auto second = registry.lookup(key).value();
  EXPECT_EQ(registry.reader_count(key), 2u);
  registry.remove(key);
  EXPECT_EQ(registry.reader_count(key), 2u);
  first.reset();
  EXPECT_EQ(registry.reader_count(key), 1u);
  EXPECT_FALSE(alive.expired());
  second.reset();
  EXPECT_EQ(registry.reader_count(key), 0u);
  EXPECT_TRUE(alive.expired());
}

TEST(SegmentRegistry, ASessionReadsItsOwnRegionsOnly) {
  SegmentRegistry registry;
  const RegionKey mine = add_region(registry);
  const RegionKey other = add_region(registry);
  const Session session = session_for({mine});
  registry.admit(session);
  EXPECT_TRUE(registry.lookup(session.token, mine).has_value());
  EXPECT_EQ(registry.lookup(session.token, other).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(registry.lookup(SessionToken::random(), mine).error().code(), ErrorCode::kDenied);
  registry.remove(mine);
  EXPECT_EQ(registry.lookup(session.token, mine).error().code(), ErrorCode::kStale);
}

TEST(SegmentRegistry, ASuccessorRegionIsNotInTheOldSession) {
  SegmentRegistry registry;
  const RegionKey key = add_region(registry);
  const Session session = session_for({key});
  registry.admit(session);
  registry.remove(key);
  const RegionKey successor = add_region(registry);
  ASSERT_EQ(successor.region, key.region);
  EXPECT_EQ(registry.lookup(session.token, successor).error().code(), ErrorCode::kDenied);
}

TEST(SegmentRegistry, RevokedSessionsAreDeniedAndTheChangeIsVisible) {
  SegmentRegistry registry;
  const RegionKey key = add_region(registry);
  const Session session = session_for({key});
  registry.admit(session);
  ASSERT_TRUE(registry.find_session(session.token).has_value());
  const std::uint64_t before = registry.change_count();
  registry.revoke(session.token);
  EXPECT_NE(registry.change_count(), before);
  EXPECT_FALSE(registry.find_session(session.token).has_value());
  EXPECT_EQ(registry.lookup(session.token, key).error().code(), ErrorCode::kDenied);
}

TEST(SegmentRegistry, AdmittingAgainReplacesRegionsAndRate) {
  SegmentRegistry registry;
  const RegionKey first = add_region(registry);
  const RegionKey second = add_region(registry);
  Session session = session_for({first});
  registry.admit(session);
  session.regions = {second, first};  // unsorted on purpose
  session.max_bytes_per_second = 7;
  registry.admit(session);
  EXPECT_TRUE(registry.lookup(session.token, first).has_value());
  EXPECT_TRUE(registry.lookup(session.token, second).has_value());
  EXPECT_EQ(registry.find_session(session.token)->max_bytes_per_second, 7u);
}

TEST(SegmentRegistry, ConcurrentReadersNeverSeeAFreedRegion) {
  SegmentRegistry registry;
  std::atomic<bool> stop = false;
  std::atomic<std::uint64_t> newest{0};
  std::atomic<int> wrong = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        const std::uint64_t packed = newest;
        const RegionKey key{static_cast<std::uint32_t>(packed >> 32),
                            static_cast<std::uint32_t>(packed)};
        const auto region = registry.lookup(key);
        if (!region) continue;
        const auto owner = std::static_pointer_cast<const RegionKey>((*region)->keep_alive);
        if (!owner || (*region)->key != key) ++wrong;
      }
    });
  }
  for (int i = 0; i < 5000; ++i) {
    const RegionKey key = add_region(registry, std::make_shared<RegionKey>());
    newest = std::uint64_t{key.region} << 32 | key.generation;
    if (i % 8 == 0) std::this_thread::yield();
    registry.remove(key);
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST(RateLimiter, NeverGrantsMoreThanRateTimesTimePlusOneBurst) {
  constexpr std::uint64_t kRate = 100'000'000;
  RateLimiter limiter(kRate);
  TimePoint now{std::chrono::seconds(1)};
  const TimePoint start = now;
  std::uint64_t granted = 0;
  for (int step = 0; step < 10'000; ++step) {
    granted += limiter.take(300'000, now);
    now += std::chrono::microseconds(100);
  }
  const auto allowed = static_cast<std::uint64_t>(seconds(now - start) * kRate);
  EXPECT_LE(granted, allowed + kRate / 100);
  EXPECT_GE(granted, allowed * 95 / 100);
}

TEST(RateLimiter, IsReadyWhenItSaysSo) {
  RateLimiter limiter(1'000'000);
  TimePoint now{std::chrono::seconds(1)};
  for (int i = 0; i < 1000; ++i) {
    while (limiter.take(1 << 20, now) != 0) {
    }
    now = limiter.ready_at(now);
    ASSERT_GT(limiter.take(1 << 20, now), 0u) << "round " << i;
  }
}

TEST(RateLimiter, ZeroMeansNoCap) {
  RateLimiter limiter(0);
  EXPECT_EQ(limiter.take(1ull << 40, TimePoint{}), 1ull << 40);
  limiter.set_rate(1000);
  EXPECT_LT(limiter.take(1ull << 40, TimePoint{std::chrono::seconds(1)}), 1ull << 40);
}

TEST(RateLimiter, WhatIsGivenBackCanBeTakenAgain) {
  RateLimiter limiter(1'000'000);
  const TimePoint now{std::chrono::seconds(1)};
  const std::uint64_t all = limiter.take(1 << 20, now);
  ASSERT_GT(all, 0u);
  EXPECT_EQ(limiter.take(1 << 20, now), 0u);
  limiter.give_back(all);
  EXPECT_EQ(limiter.take(1 << 20, now), all);
}

}  // namespace
}  // namespace rekindle::transport
