// The engine over fake peers that die, freeze, lie and crawl.
#include "transport/engine.h"

#include <atomic>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/numa_nodes.h"
#include "src/base/units.h"
#include "tests/support/thread_cpus.h"
#include "tests/transport/engine_fixture.h"

namespace rekindle::transport::testing {
namespace {

constexpr std::uint64_t kSlice = 256 * kKiB;

class EngineTest : public ::testing::Test {
 protected:
  const std::unique_ptr<Engine> engine_ = Engine::create({.poller_threads = 2});
};

TEST_F(EngineTest, ABatchOverSeveralSourcesLandsEveryByteAndUsesThemAll) {
  TestRun run(*engine_, 200, kSlice);
  run.start();
  const fake::Script script{.delay = 1ms, .bytes_per_second = 200'000'000};
  for (int i = 0; i < 3; ++i) run.add_source(script);
  run.expect_complete();
  const BatchProgress progress = run.batch->progress();
  ASSERT_EQ(progress.sources.size(), 3u);
  std::uint64_t bytes = 0;
  for (const auto& source : progress.sources) {
    EXPECT_GT(source.slices, 0u);
    EXPECT_EQ(source.failures, 0u);
    bytes += source.bytes;
  }
  EXPECT_EQ(bytes, 200 * kSlice);
  EXPECT_EQ(progress.bytes_done, 200 * kSlice);
  EXPECT_EQ(progress.paths.size(), 6u);
  EXPECT_TRUE(run.observer.lost().empty());
}

TEST(EngineNodesTest, ABatchWithANodeIsPolledOnItsCpus) {
  const auto allowed = allowed_cpus();
  ASSERT_FALSE(allowed.empty());
  const std::vector<int> last = {allowed.back()};
  EngineOptions options{.poller_threads = 2};
  options.nodes = {{0, {allowed.front()}, true, {}}, {1, last, true, {}}, {2, {}, true, {}}};
  const auto engine = Engine::create(options);
  const auto pollers_of_a_node = [] {
    auto threads = rekindle::testing::cpus_of_threads();
    std::erase_if(threads, [](const auto& thread) { return !thread.first.starts_with("rk-node"); });
    return threads;
  };
  for (const int node : {-1, 2, 7}) {  // unknown, without CPUs, not here
    TestRun run(*engine, 20, kSlice);
    run.start({.numa_node = node});
    run.add_source();
    run.expect_complete();
    EXPECT_TRUE(pollers_of_a_node().empty()) << node;
  }
  TestRun run(*engine, 20, kSlice);
  run.start({.numa_node = 1});
  run.add_source();
  run.expect_complete();
  EXPECT_THAT(pollers_of_a_node(), ::testing::ElementsAre(::testing::Pair("rk-node1-0", last)));
}

TEST(EngineNodesTest, OneNodeThatMayBeUsedIsNoReasonForMorePollers) {
  EngineOptions options{.poller_threads = 2};
  options.nodes = {{0, allowed_cpus(), true, {}}, {1, {65'000}, true, {}}};
  const auto engine = Engine::create(options);
  TestRun run(*engine, 20, kSlice);
  run.start({.numa_node = 0});
  run.add_source();
  run.expect_complete();
  for (const auto& [name, cpus] : rekindle::testing::cpus_of_threads()) {
    EXPECT_FALSE(name.starts_with("rk-node")) << name;
    EXPECT_EQ(cpus, allowed_cpus()) << name;
  }
}

TEST_F(EngineTest, PathsThatMustBePolledAndTakeShortPrefixesServeToo) {
  TestRun run(*engine_, 60, 64 * kKiB + 4);
  run.start();
  run.add_source({.queue_depth = 3, .ops_per_post = 1, .pollable = false}, 1);
  run.add_source({.delay = 1ms, .queue_depth = 1, .ops_per_post = 1}, 1);
  run.expect_complete();
}

TEST_F(EngineTest, APeerThatDiesInTheMiddleCostsOnlyARetry) {
  TestRun run(*engine_, 300, kSlice);
  std::atomic<int> landed = 0;
  run.add_peer();
  run.add_peer();
  run.slices.on_landed = [&](SliceIndex, SourceIndex) {
    if (++landed == 50) run.peer(1).kill();
  };
  run.start();
  run.connect(0, {.bytes_per_second = 300'000'000, .drain_delay = 20ms});
  run.connect(1, {.bytes_per_second = 300'000'000, .drain_delay = 20ms});
  run.expect_complete();
  const auto lost = run.observer.lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].first, 1u);
  EXPECT_EQ(lost[0].second.code(), ErrorCode::kPeerLost);
  EXPECT_NE(lost[0].second.message().find("peer1"), std::string::npos);
}

TEST_F(EngineTest, APathThatBreaksLeavesItsSourceAlive) {
  TestRun run(*engine_, 100, kSlice);
  run.start();
  run.add_source({}, 1);
  auto broken = run.peer(0).connect(run.token(0), {.break_at = 4}, &run.ledger);
  ASSERT_TRUE(broken);
  std::vector<std::unique_ptr<Path>> paths;
  paths.push_back(std::move(*broken));
  run.batch->add_paths(0, std::move(paths));
  run.expect_complete();
  EXPECT_TRUE(run.observer.lost().empty());
}

TEST_F(EngineTest, Row3AFrozenSourceIsDroppedByTheProgressDeadline) {
  TestRun run(*engine_, 120, kSlice);
  BatchOptions options;
  options.progress_timeout = 150ms;
  run.start(options);
  // Slow, so that it is frozen before it is done.
  auto& frozen = run.add_source({.bytes_per_second = 1'000'000, .drain_delay = 20ms});
  frozen.freeze(true);
  run.add_source({.bytes_per_second = 60'000'000, .drain_delay = 20ms});
  run.expect_complete();
  const auto lost = run.observer.lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].second.code(), ErrorCode::kTimeout);
}

TEST_F(EngineTest, LostCompletionsAreFetchedElsewhereAfterTheirPathHasDrained) {
  TestRun run(*engine_, 80, kSlice);
  BatchOptions options;
  options.progress_timeout = 150ms;
  run.start(options);
  run.add_source({.lose_from = 10, .drain_delay = 30ms});
  run.add_source({.bytes_per_second = 100'000'000, .drain_delay = 30ms});
  run.expect_complete();
  EXPECT_GT(run.slices.drops, 0u);
}

TEST_F(EngineTest, TheLastSlicesAreTakenFromASlowSourceOnceItsPathHasDrained) {
  TestRun run(*engine_, 100, 1 * kMiB);
  BatchOptions options;
  options.progress_timeout = 30s;  // the steal comes first
  run.start(options);
  run.add_source({.bytes_per_second = 500'000, .drain_delay = 30ms}, 1);
  run.add_source({.bytes_per_second = 200'000'000, .drain_delay = 30ms});
  run.expect_complete();
  EXPECT_GT(run.batch->progress().stolen_slices, 0u);
}

TEST_F(EngineTest, CorruptSlicesComeFromAnotherSourceAndTheSecondQuarantinesTheLiar) {
  TestRun run(*engine_, 100, kSlice);
  run.start();
  run.add_source({.delay = 1ms, .corrupt_from = 0});
  run.add_source({.delay = 1ms});
  run.expect_complete();
  const auto lost = run.observer.lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].first, 0u);
  EXPECT_EQ(lost[0].second.code(), ErrorCode::kCorrupt);
  EXPECT_EQ(run.slices.accepted_from[0], 0u);
  EXPECT_GE(run.batch->progress().sources[0].failures, 2u);
}

TEST_F(EngineTest, OneFaultyReadIsRetriedAndDoesNotCostTheSource) {
  TestRun run(*engine_, 50, kSlice);
  run.start();
  run.add_source({.fail_at = 7, .fail_status = OpStatus::kFault}, 1);
  run.expect_complete();
  EXPECT_TRUE(run.observer.lost().empty());
  EXPECT_EQ(run.batch->progress().retried_slices, 1u);
}

TEST_F(EngineTest, ADestinationThatCannotBeWrittenEndsTheBatchAndBlamesNobody) {
  TestRun run(*engine_, 50, kSlice);
  run.start();
  run.add_source({.fail_at = 7, .fail_status = OpStatus::kLocalFault});
  run.add_source({.delay = 1ms});
  const auto outcome = run.observer.wait();
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code(), ErrorCode::kInternal);
  EXPECT_NE(outcome.error().message().find("destination"), std::string::npos);
  EXPECT_TRUE(run.observer.lost().empty());
  for (const auto& source : run.batch->progress().sources) EXPECT_EQ(source.failures, 0u);
}

TEST_F(EngineTest, ADestinationThatCannotBeReadBackEndsTheBatchAndBlamesNobody) {
  TestRun run(*engine_, 50, kSlice);
  run.slices.scripted_verdict = Verdict::kLocalFault;
  run.start();
  run.add_source();
  const auto outcome = run.observer.wait();
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code(), ErrorCode::kInternal);
  EXPECT_TRUE(run.observer.lost().empty());
  EXPECT_EQ(run.batch->progress().sources[0].failures, 0u);
}

TEST_F(EngineTest, AStaleKeyLosesTheSourceWithThatCause) {
  TestRun run(*engine_, 50, kSlice);
  run.add_peer();
  run.add_peer();
  run.peer(0).remove_region(run.key(0));
  run.start();
  run.connect(0);
  run.connect(1, {.bytes_per_second = 100'000'000});
  run.expect_complete();
  const auto lost = run.observer.lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].second.code(), ErrorCode::kStale);
}

TEST_F(EngineTest, ASliceThatNobodyDeliversIntactFailsTheBatchWithItsName) {
  TestRun run(*engine_, 1, kSlice);
  BatchOptions options;
  options.max_attempts = 4;
  options.strikes_to_quarantine = 100;
  run.start(options);
  run.add_source({.corrupt_from = 0});
  const auto outcome = run.observer.wait();
  ASSERT_FALSE(outcome);
  EXPECT_NE(outcome.error().message().find("slice 0 failed 4 times"), std::string::npos);
  run.expect_drained();
  EXPECT_EQ(run.slices.rejected, 4u);
}

TEST_F(EngineTest, CancelDrainsBeforeItReports) {
  TestRun run(*engine_, 400, kSlice);
  std::atomic<bool> early = false;
  run.observer.before_finish = [&] { early = run.slices.outstanding() != 0; };
  run.start();
  run.add_source({.bytes_per_second = 20'000'000, .drain_delay = 60ms});
  ASSERT_TRUE(eventually([&] { return run.batch->progress().slices_done > 2; }));
  run.batch->cancel();
  const auto outcome = run.observer.wait();
  ASSERT_FALSE(outcome);
  EXPECT_FALSE(early) << "on_finished came while reads were in flight";
  run.expect_drained();
  std::fill(run.slices.local().begin(), run.slices.local().end(), std::byte{0x11});
  std::this_thread::sleep_for(100ms);  // longer than the drain
  EXPECT_EQ(std::count(run.slices.local().begin(), run.slices.local().end(), std::byte{0x11}),
            static_cast<std::ptrdiff_t>(run.slices.local().size()));
}

TEST_F(EngineTest, DestroyingARunningBatchDrainsIt) {
  TestRun run(*engine_, 400, kSlice);
  run.start();
  run.add_source({.bytes_per_second = 20'000'000, .drain_delay = 40ms});
  ASSERT_TRUE(eventually([&] { return run.batch->progress().slices_done > 0; }));
  run.slices.set_batch(nullptr);
  run.batch.reset();
  EXPECT_EQ(run.observer.finishes(), 1);
  EXPECT_EQ(run.slices.outstanding(), 0u);
  EXPECT_EQ(run.ledger.conflicts(), 0u);
}

TEST_F(EngineTest, StarvationIsToldAndThenFailsTheBatchNamingItsSlices) {
  TestRun run(*engine_, 10, kSlice);
  BatchOptions options;
  options.starvation_timeout = 100ms;
  run.start(options);
  const auto outcome = run.observer.wait();
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(outcome.error().message().find("10 of 10 slices"), std::string::npos);
  ASSERT_EQ(run.observer.starved().size(), 1u);
  EXPECT_EQ(run.observer.starved()[0].open_slices, 10u);
  EXPECT_EQ(run.observer.starved()[0].additions, 0u);
}

TEST_F(EngineTest, ASourceThatJoinsLaterRescuesAStarvingBatch) {
  TestRun run(*engine_, 40, kSlice);
  run.slices.candidates = [](SliceIndex slice) { return SourceMask(slice < 20 ? 3 : 2); };
  run.start();
  run.add_source();
  ASSERT_TRUE(eventually([&] { return !run.observer.starved().empty(); }));
  run.add_source();
  run.expect_complete();
  EXPECT_EQ(run.slices.accepted_from[0] + run.slices.accepted_from[1], 40u);
}

// An observer that hears of it late can tell that paths have come since.
TEST_F(EngineTest, StarvationIsToldAgainAfterASourceThatDoesNotHelp) {
  TestRun run(*engine_, 40, kSlice);
  run.slices.candidates = [](SliceIndex slice) { return SourceMask(slice < 20 ? 3 : 4); };
  run.start();
  for (std::uint64_t additions = 1; additions <= 2; ++additions) {
    run.add_source();
    ASSERT_TRUE(eventually([&] {
      const auto starved = run.observer.starved();
      return !starved.empty() && starved.back().additions == additions;
    }));
    EXPECT_EQ(run.observer.starved().back().open_slices, 20u);
  }
  run.add_source();
  run.expect_complete();
  EXPECT_LE(run.observer.starved().back().additions, 2u);
}

TEST_F(EngineTest, ALostSourceMayComeBack) {
  TestRun run(*engine_, 60, kSlice);
  run.start();
  run.add_source({.break_at = 20, .drain_delay = 10ms}, 1);
  ASSERT_TRUE(eventually([&] { return !run.observer.lost().empty(); }));
  EXPECT_FALSE(run.observer.finished());
  run.connect(0);
  run.expect_complete();
}

TEST_F(EngineTest, ARemovedSourceIsDrainedAndReported) {
  TestRun run(*engine_, 200, kSlice);
  run.start();
  run.add_source({.bytes_per_second = 30'000'000, .drain_delay = 20ms});
  ASSERT_TRUE(eventually([&] { return run.batch->progress().slices_done > 5; }));
  run.batch->remove_source(0, Error(ErrorCode::kDenied, "its grant was revoked"));
  ASSERT_TRUE(eventually([&] { return !run.observer.lost().empty(); }));
  run.add_source({.bytes_per_second = 100'000'000, .drain_delay = 20ms});
  run.expect_complete();
  const auto lost = run.observer.lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].second.message(), "its grant was revoked");
}

TEST_F(EngineTest, WithoutStagingItWaitsForASliceToEnd) {
  TestRun run(*engine_, 100, kSlice);
  run.slices.staging_left = 3;
  run.start();
  run.add_source({.delay = 1ms, .fail_at = 30, .fail_status = OpStatus::kFault}, 1);
  run.add_source({.delay = 1ms, .break_at = 20, .drain_delay = 10ms});
  run.expect_complete();
}

TEST_F(EngineTest, WithoutAnyStagingItFailsInsteadOfWaitingForEver) {
  TestRun run(*engine_, 5, kSlice);
  run.slices.staging_left = 0;
  BatchOptions options;
  options.starvation_timeout = 100ms;
  run.start(options);
  run.add_source();
  const auto outcome = run.observer.wait();
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code(), ErrorCode::kExhausted);
}

TEST_F(EngineTest, SlowVerificationBoundsWhatLandsUnverified) {
  TestRun run(*engine_, 64, 1 * kMiB);
  run.slices.hold_verdicts = true;
  BatchOptions options;
  options.window_bytes = 4 * kMiB;
  run.start(options);
  run.add_source();
  std::this_thread::sleep_for(50ms);  // a batch that does not stop would go on meanwhile
  run.batch->cancel();
  ASSERT_FALSE(run.observer.wait());
  EXPECT_LE(run.slices.held.size(), 14u);
}

TEST_F(EngineTest, SeveralBatchesRunAtOnceAndDoNotMix) {
  std::vector<std::unique_ptr<TestRun>> runs;
  for (int i = 0; i < 6; ++i) {
    runs.push_back(std::make_unique<TestRun>(*engine_, 60u + static_cast<SliceIndex>(i), kSlice));
    runs.back()->start();
    runs.back()->add_source({.delay = 1ms, .bytes_per_second = 200'000'000});
    runs.back()->add_source({.break_at = i % 2 == 0 ? 9u : fake::kNever, .drain_delay = 5ms});
  }
  for (auto& run : runs) run->expect_complete();
}

TEST_F(EngineTest, AnEmptyBatchSucceedsAndLatePathsAreClosed) {
  TestRun run(*engine_, 0, kSlice);
  run.start();
  ASSERT_TRUE(run.observer.wait());
  run.add_source();
  run.add_source();
  EXPECT_EQ(run.observer.finishes(), 1);
}

TEST_F(EngineTest, AnIdleSourceThatDiedIsNoticedWithoutAskingIt) {
  TestRun run(*engine_, 20, kSlice);
  run.slices.candidates = [](SliceIndex) { return SourceMask(1); };
  run.start();
  run.add_source({.bytes_per_second = 2'000'000});
  run.add_source();  // holds nothing
  ASSERT_TRUE(eventually([&] { return run.batch->progress().slices_done > 0; }));
  run.peer(1).kill();
  EXPECT_TRUE(eventually([&] { return run.observer.lost().size() == 1; }));
  EXPECT_FALSE(run.observer.finished());
  run.expect_complete();
}

TEST_F(EngineTest, RandomFaultsNeverBreakTheRules) {
  const std::uint64_t base = std::random_device{}();
  for (std::uint64_t seed = base; seed < base + 25; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    TestRun run(*engine_, static_cast<SliceIndex>(1 + random() % 150), 48 * kKiB + 8);
    BatchOptions options;
    options.progress_timeout = 100ms;
    options.first_slice = static_cast<SliceIndex>(random() % 200);
    run.start(options);
    run.add_source({.delay = std::chrono::microseconds(random() % 2000), .drain_delay = 3ms}, 1);
    for (int i = 0; i < 3; ++i) {
      fake::Script script{.delay = std::chrono::microseconds(random() % 1000), .drain_delay = 8ms};
      const std::uint64_t when = random() % 60;
      switch (random() % 6) {
        case 0:
          script.break_at = when;
          break;
        case 1:
          script.lose_from = when;
          break;
        case 2:
          script.corrupt_from = when, script.corrupt_to = when + 3;
          break;
        case 3:
          script.fail_at = when;
          break;
        case 4:
          script.bytes_per_second = 1'000'000;
          break;
        default:
          break;
      }
      run.add_source(script, 1 + static_cast<int>(random() % 3));
    }
    // At the very end the reliable source may lose its slices to another. It is reconnected, as a
    // pull would do.
    std::size_t returned = 0;
    ASSERT_TRUE(eventually([&] {
      const auto lost = run.observer.lost();
      for (; returned < lost.size(); ++returned) {
        if (lost[returned].first == 0) run.connect(0, {.drain_delay = 3ms}, 1);
      }
      return run.observer.finished();
    }));
    run.expect_complete();
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
}

}  // namespace
}  // namespace rekindle::transport::testing
