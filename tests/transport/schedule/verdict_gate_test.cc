// The landed bytes that may wait for verification, on paper and in a transfer at 400 GB/s in
// virtual time.
#include "transport/schedule/verdict_gate.h"

#include <algorithm>
#include <deque>
#include <queue>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "transport/schedule/scheduler.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kLeast = 64 * kMiB;
constexpr std::uint64_t kSlice = 4 * kMiB;

TEST(VerdictGate, AllowsTwiceWhatIsUnderWayAtTheRateAndLatency) {
  VerdictGate gate(kLeast);
  EXPECT_EQ(gate.limit_bytes(), kLeast);
  // 1 ms later 400 MB have been accepted: 400 GB/s.
  gate.landed(1, kSlice, 0, TimePoint{1s});
  gate.resolved(1, 400'000'000, TimePoint{1s} + 1ms);
  EXPECT_NEAR(static_cast<double>(gate.limit_bytes()), 800e6, 1e3);
}

TEST(VerdictGate, AQueueThatGrowsDoesNotOpenItFurther) {
  VerdictGate gate(kLeast);
  const auto follow = [&](SliceIndex slice, std::uint64_t bytes, std::uint64_t accepted,
                          Duration latency) {
    gate.landed(slice, bytes, 0, TimePoint{1s});
    gate.resolved(slice, accepted, TimePoint{1s} + latency);
  };
  follow(1, kSlice, 100'000'000, 1ms);
  const std::uint64_t limit = gate.limit_bytes();
  for (SliceIndex i = 2; i < 100; ++i) follow(i, kSlice, 100'000'000ull * i, 1ms * i);
  EXPECT_EQ(gate.limit_bytes(), limit);
  // Nor does a small slice, which verifies at once, close it.
  follow(100, 4 * kKiB, 4 * kKiB, 1us);
  EXPECT_EQ(gate.limit_bytes(), limit);
}

TEST(VerdictGate, FollowsOneSliceAtATimeAndIgnoresOthers) {
  VerdictGate gate(kLeast);
  gate.landed(1, kSlice, 0, TimePoint{1s});
  gate.landed(2, kSlice, 0, TimePoint{2s});
  gate.resolved(2, 1'000'000'000, TimePoint{2s} + 1ms);
  EXPECT_EQ(gate.limit_bytes(), kLeast);
  gate.resolved(1, 0, TimePoint{1s});  // no time has passed
  EXPECT_EQ(gate.limit_bytes(), kLeast);
}

// A source that sends over NICs, and threads that verify what has landed.
struct Machine {
  int nics = 8;
  double nic_bytes_per_second = 50e9;
  std::size_t digest_threads = 128;
  Duration digest_time = 1ms;  // of a slice
};

struct Outcome {
  double bytes_per_second = 0;
  std::uint64_t most_waiting = 0;  // bytes
};

Outcome run(const Machine& machine, SliceIndex slices) {
  BatchOptions options;
  TimePoint now{1s};
  Scheduler scheduler(
      slices,
      [](SliceIndex) {
        return SliceInfo{kSlice, SourceMask(1)};
      },
      options, now);
  struct Nic {
    std::deque<SliceIndex> queue;
    double sent = 0;  // of the first
    std::uint64_t landed = 0;
  };
  std::vector<Nic> nics(static_cast<std::size_t>(machine.nics));
  for (int i = 0; i < machine.nics; ++i)
    scheduler.add_path(0, "path", now, "nic" + std::to_string(i));
  std::deque<SliceIndex> waiting;
  std::deque<std::pair<TimePoint, SliceIndex>> digesting;
  Outcome outcome;
  constexpr Duration kStep = 10us;
  const TimePoint begun = now;
  TimePoint next_tick = now;
  while (scheduler.progress().slices_done < slices && now < begun + 60s) {
    while (const auto post = scheduler.next_post(now))
      nics[post->path].queue.push_back(post->slice);
    now += kStep;
    for (PathId id = 0; id < nics.size(); ++id) {
      Nic& nic = nics[id];
      double budget = machine.nic_bytes_per_second * seconds(kStep);
      while (!nic.queue.empty() && budget > 0) {
        const double part = std::min(budget, static_cast<double>(kSlice) - nic.sent);
        budget -= part;
        nic.sent += part;
        if (nic.sent < static_cast<double>(kSlice)) break;
        nic.sent = 0;
        nic.landed += kSlice;
        scheduler.path_progress(id, nic.landed, now);
        scheduler.slice_done(id, nic.queue.front(), OpStatus::kOk, now);
        waiting.push_back(nic.queue.front());
        nic.queue.pop_front();
      }
    }
    while (!digesting.empty() && digesting.front().first <= now) {
      scheduler.resolve(digesting.front().second, Verdict::kAccept, now);
      digesting.pop_front();
    }
    for (; !waiting.empty() && digesting.size() < machine.digest_threads; waiting.pop_front()) {
      digesting.emplace_back(now + machine.digest_time, waiting.front());
    }
    outcome.most_waiting =
        std::max(outcome.most_waiting, (waiting.size() + digesting.size()) * kSlice);
    if (now >= next_tick) scheduler.tick(next_tick = now + 10ms);
  }
  outcome.bytes_per_second = static_cast<double>(slices) * kSlice / seconds(now - begun);
  return outcome;
}

TEST(VerdictGate, EightNicsAreFilledWhileVerificationKeepsUp) {
  const Outcome outcome = run({}, 20'000);
  EXPECT_GT(outcome.bytes_per_second, 0.98 * 400e9);
  EXPECT_LT(outcome.most_waiting, 2 * kGiB);
}

TEST(VerdictGate, WhatIsNotVerifiedStaysBoundedWhereVerificationIsTheLimit) {
  const Outcome outcome = run({.digest_threads = 16}, 5'000);
  EXPECT_NEAR(outcome.bytes_per_second, 16 * kSlice / 1e-3, 0.05 * 16 * kSlice / 1e-3);
  EXPECT_LT(outcome.most_waiting, 1 * kGiB);
}

}  // namespace
}  // namespace rekindle::transport
