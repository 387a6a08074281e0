// The engine's policy, event by event.
#include "transport/schedule/scheduler.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/units.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSlice = 2 * kMiB;
constexpr Duration kStep = 10ms;

TEST(Scheduler, SlicesWithoutBytesAreFetchedToo) {
  Scheduler scheduler(
      2,
      [](SliceIndex) {
        return SliceInfo{0, SourceMask(1)};
      },
      {}, TimePoint{});
  const PathId path = scheduler.add_path(0, "path", TimePoint{});
  for (int i = 0; i < 2; ++i) {
    const auto post = scheduler.next_post(TimePoint{});
    ASSERT_TRUE(post);
    scheduler.slice_done(path, post->slice, OpStatus::kOk, TimePoint{});
    scheduler.resolve(post->slice, Verdict::kAccept, TimePoint{});
  }
  scheduler.path_closed(path, "");
  ASSERT_TRUE(scheduler.outcome());
  EXPECT_TRUE(*scheduler.outcome());
}

TEST(Scheduler, APauseOfOurOwnProcessIsNotHeldAgainstThePeers) {
  TimePoint now{1s};
  Scheduler scheduler(
      4,
      [](SliceIndex) {
        return SliceInfo{kSlice, SourceMask(1)};
      },
      {}, now);
  scheduler.add_path(0, "path", now);
  ASSERT_TRUE(scheduler.next_post(now));
  scheduler.tick(now += 10ms);
  scheduler.tick(now += 30s);  // SIGSTOP, SIGCONT
  EXPECT_TRUE(scheduler.take_aborts().empty());
  for (int i = 0; i < 150; ++i) scheduler.tick(now += 10ms);
  EXPECT_EQ(scheduler.take_aborts().size(), 1u);
}

TEST(Scheduler, EverySourceServesTheSliceThatItAloneHolds) {
  const TimePoint now{1s};
  Scheduler scheduler(
      kMaxSources,
      [](SliceIndex slice) {
        return SliceInfo{kSlice, SourceMask::of(slice)};
      },
      {}, now);
  for (SourceIndex source = 0; source < kMaxSources; ++source) {
    scheduler.add_path(source, "path", now);
  }
  SourceMask asked;
  while (const auto post = scheduler.next_post(now)) {
    EXPECT_EQ(post->source, post->slice);
    asked.set(post->source);
    scheduler.slice_done(post->path, post->slice, OpStatus::kOk, now);
    scheduler.resolve(post->slice, Verdict::kAccept, now);
  }
  EXPECT_EQ(asked.count(), static_cast<int>(kMaxSources));
  EXPECT_EQ(scheduler.progress().slices_done, kMaxSources);
}

TEST(SourceMask, HasItsSourcesInOrder) {
  SourceMask mask;
  EXPECT_TRUE(mask.empty());
  EXPECT_EQ(mask.next(), kMaxSources);
  for (const SourceIndex source : {3u, 63u, 64u, 200u, kMaxSources - 1}) mask.set(source);
  std::vector<SourceIndex> found;
  for (SourceIndex source = mask.next(); source < kMaxSources; source = mask.next(source + 1)) {
    found.push_back(source);
  }
  EXPECT_EQ(found, (std::vector<SourceIndex>{3, 63, 64, 200, kMaxSources - 1}));
  EXPECT_EQ(mask.count(), 5);
  EXPECT_EQ((mask & SourceMask::first(64)), SourceMask((1ull << 63) | 8));
  EXPECT_EQ((mask & ~SourceMask::of(200)).next(65), kMaxSources - 1);
  mask.reset(kMaxSources - 1);
  EXPECT_EQ(mask.next(201), kMaxSources);
}

// Bytes in flight at one source over eight paths that never land anything.
std::uint64_t bytes_in_flight(bool over_nics) {
  const TimePoint now{1s};
  Scheduler scheduler(
      1000,
      [](SliceIndex) {
        return SliceInfo{kSlice, SourceMask(1)};
      },
      {}, now);
  for (int i = 0; i < 8; ++i) {
    scheduler.add_path(0, "path", now, over_nics ? "mlx5_" + std::to_string(i) : "");
  }
  std::uint64_t bytes = 0;
  while (scheduler.next_post(now)) bytes += kSlice;
  return bytes;
}

TEST(Scheduler, EachNicOfASourceHasAWindowOfItsOwn) {
  EXPECT_EQ(bytes_in_flight(false), 4 * kMiB);
  EXPECT_EQ(bytes_in_flight(true), 64 * kMiB);
}

// One slice in flight, on one of three NICs: the silence of one is not yet that of the source.
TEST(Scheduler, ASilentNicIsCutAloneAndASecondOneTakesTheSourceWithIt) {
  TimePoint now{1s};
  Scheduler scheduler(
      1,
      [](SliceIndex) {
        return SliceInfo{kSlice, SourceMask(1)};
      },
      {}, now);
  for (int i = 0; i < 3; ++i) scheduler.add_path(0, "path", now, "mlx5_" + std::to_string(i));
  const auto wait_for_aborts = [&] {
    for (int i = 0; i < 200; ++i) {
      scheduler.tick(now += kStep);
      auto aborts = scheduler.take_aborts();
      if (!aborts.empty()) return aborts;
    }
    return std::vector<PathId>{};
  };
  const auto first = scheduler.next_post(now);
  ASSERT_TRUE(first);
  EXPECT_EQ(wait_for_aborts(), std::vector<PathId>{first->path});
  scheduler.slice_done(first->path, first->slice, OpStatus::kAborted, now);
  scheduler.path_closed(first->path, "");
  ASSERT_TRUE(scheduler.next_post(now));
  EXPECT_EQ(wait_for_aborts().size(), 2u);
}

TEST(Scheduler, PathsOfASourceThatIsNotNeededAreClosed) {
  TimePoint now{1s};
  BatchOptions options;
  options.idle_timeout = 5s;
  Scheduler scheduler(
      2,
      [](SliceIndex) {
        return SliceInfo{kSlice, SourceMask(1)};
      },
      options, now);
  const PathId busy = scheduler.add_path(0, "busy", now);
  const PathId idle = scheduler.add_path(1, "idle", now);
  ASSERT_TRUE(scheduler.next_post(now));
  std::uint64_t landed = 0;
  for (int i = 0; i < 600; ++i) {
    scheduler.path_progress(busy, ++landed, now);
    scheduler.tick(now += kStep);
  }
  EXPECT_EQ(scheduler.take_aborts(), std::vector<PathId>{idle});
  scheduler.path_closed(idle, "");
  const auto lost = scheduler.take_lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].source, 1u);
  EXPECT_EQ(lost[0].cause.code(), ErrorCode::kUnavailable);  // worth having back when starved
}

TEST(Scheduler, StaleKeysLoseTheSourceAtOnce) {
  for (const OpStatus status : {OpStatus::kStale, OpStatus::kDenied}) {
    TimePoint now{1s};
    Scheduler scheduler(
        4,
        [](SliceIndex) {
          return SliceInfo{kSlice, SourceMask(1)};
        },
        {}, now);
    const PathId path = scheduler.add_path(0, "path", now);
    const auto post = scheduler.next_post(now);
    ASSERT_TRUE(post);
    scheduler.slice_done(path, post->slice, status, now);
    ASSERT_EQ(scheduler.take_aborts(), std::vector<PathId>{path});
    scheduler.path_closed(path, "");
    const auto lost = scheduler.take_lost();
    ASSERT_EQ(lost.size(), 1u);
    EXPECT_EQ(lost[0].cause.code(), to_error_code(status));
  }
}

// One batch of slices that sources 0 and 1 both hold, driven by hand.
class Steps {
 public:
  explicit Steps(SliceIndex slices, SourceMask holders = SourceMask(3))
      : scheduler(
            slices,
            [holders](SliceIndex) {
              return SliceInfo{kSlice, holders};
            },
            {}, now) {}

  void wait(Duration duration) {
    for (Duration waited{0}; waited < duration; waited += kStep) scheduler.tick(now += kStep);
  }
  // What a poller would report of an aborted path.
  void drain(PathId path, const std::vector<SliceIndex>& slices) {
    for (const SliceIndex slice : slices) {
      scheduler.slice_done(path, slice, OpStatus::kAborted, now);
    }
    scheduler.path_closed(path, "");
  }

  TimePoint now{1s};
  Scheduler scheduler;
};

TEST(Scheduler, ASourceThatSendsNothingLosesItsIdlePathsWithTheOthers) {
  Steps steps(1, SourceMask(1));
  const PathId busy = steps.scheduler.add_path(0, "busy", steps.now);
  const PathId idle = steps.scheduler.add_path(0, "idle", steps.now);
  ASSERT_TRUE(steps.scheduler.next_post(steps.now));
  steps.wait(1100ms);
  EXPECT_EQ(steps.scheduler.take_aborts(), (std::vector<PathId>{busy, idle}));
}

TEST(Scheduler, OneStuckPathOfASourceThatSendsIsCutAlone) {
  Steps steps(8, SourceMask(1));
  const PathId first = steps.scheduler.add_path(0, "first", steps.now);
  const PathId second = steps.scheduler.add_path(0, "second", steps.now);
  ASSERT_TRUE(steps.scheduler.next_post(steps.now));
  ASSERT_TRUE(steps.scheduler.next_post(steps.now));
  for (std::uint64_t bytes = 1; bytes <= 12; ++bytes) {
    steps.wait(100ms);
    steps.scheduler.path_progress(second, bytes, steps.now);
  }
  EXPECT_EQ(steps.scheduler.take_aborts(), std::vector<PathId>{first});
  EXPECT_EQ(steps.scheduler.progress().last_byte, steps.now);
}

TEST(Scheduler, ASourceIsReportedLostBeforeTheBatchStarvesForIt) {
  Steps steps(2, SourceMask(1));
  const PathId path = steps.scheduler.add_path(0, "path", steps.now);
  const auto post = steps.scheduler.next_post(steps.now);
  ASSERT_TRUE(post);
  steps.wait(1500ms);  // silent, cut, and still draining
  EXPECT_EQ(steps.scheduler.take_aborts().size(), 1u);
  EXPECT_TRUE(steps.scheduler.take_lost().empty());
  EXPECT_FALSE(steps.scheduler.take_starved());
  steps.drain(path, {post->slice});
  EXPECT_EQ(steps.scheduler.take_lost().size(), 1u);
  steps.wait(kStep);
  EXPECT_EQ(steps.scheduler.take_starved(), 2u);
}

TEST(Scheduler, ABatchStarvesAnewAfterASourceThatWasThereBetweenTwoTicks) {
  Steps steps(2, SourceMask(1));
  steps.wait(1500ms);
  EXPECT_EQ(steps.scheduler.take_starved(), 2u);
  const PathId path = steps.scheduler.add_path(0, "path", steps.now);
  steps.drain(path, {});
  EXPECT_EQ(steps.scheduler.take_lost().size(), 1u);
  steps.wait(kStep);
  EXPECT_EQ(steps.scheduler.take_starved(), 2u);
}

TEST(Scheduler, ABatchStarvesOnAfterAPathThatDoesNotHelpAndNoMoreAfterOneThatDoes) {
  Steps steps(2, SourceMask(2));
  steps.wait(kStep);
  EXPECT_EQ(steps.scheduler.take_starved(), 2u);
  steps.wait(kStep);
  EXPECT_FALSE(steps.scheduler.take_starved()) << "nothing has changed";
  steps.scheduler.add_path(0, "holds nothing of it", steps.now);
  EXPECT_EQ(steps.scheduler.take_starved(), 2u);
  steps.scheduler.add_path(1, "path", steps.now);
  EXPECT_FALSE(steps.scheduler.take_starved());
}

TEST(Scheduler, ASliceThatNobodyCouldVerifyIsFetchedElsewhereAndCostsNobodyAStrike) {
  Steps steps(8);
  PathId paths[] = {steps.scheduler.add_path(0, "a", steps.now),
                    steps.scheduler.add_path(1, "b", steps.now)};
  for (int round = 0; round < 4; ++round) {
    const auto post = steps.scheduler.next_post(steps.now);
    ASSERT_TRUE(post);
    steps.scheduler.slice_done(paths[post->source], post->slice, OpStatus::kOk, steps.now);
    steps.scheduler.resolve(post->slice, Verdict::kUndecided, steps.now);
    const auto again = steps.scheduler.next_post(steps.now);
    ASSERT_TRUE(again);
    EXPECT_EQ(again->slice, post->slice);
    EXPECT_NE(again->source, post->source);
    steps.scheduler.slice_done(paths[again->source], again->slice, OpStatus::kOk, steps.now);
    steps.scheduler.resolve(again->slice, Verdict::kAccept, steps.now);
  }
  EXPECT_TRUE(steps.scheduler.take_lost().empty());
  EXPECT_TRUE(steps.scheduler.take_aborts().empty());
  for (const auto& source : steps.scheduler.progress().sources) EXPECT_EQ(source.failures, 0u);
}

TEST(Scheduler, ASliceThatIsNeverVerifiedFailsTheBatchAfterItsAttempts) {
  Steps steps(1, SourceMask(1));
  const PathId path = steps.scheduler.add_path(0, "a", steps.now);
  for (int attempt = 0; attempt < BatchOptions{}.max_attempts; ++attempt) {
    const auto post = steps.scheduler.next_post(steps.now);
    ASSERT_TRUE(post) << attempt;
    steps.scheduler.slice_done(path, post->slice, OpStatus::kOk, steps.now);
    steps.scheduler.resolve(post->slice, Verdict::kUndecided, steps.now);
  }
  EXPECT_FALSE(steps.scheduler.next_post(steps.now));
  steps.scheduler.path_closed(path, "");
  ASSERT_TRUE(steps.scheduler.outcome());
  ASSERT_FALSE(*steps.scheduler.outcome());
  EXPECT_NE(steps.scheduler.outcome()->error().message().find("could not be verified"),
            std::string::npos);
}

}  // namespace
}  // namespace rekindle::transport
