// The engine's policy in virtual time: thousands of seeded runs with slow, dying and lying sources.
#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/support/effort.h"
#include "transport/schedule/scheduler.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSimSlice = 2 * kMiB;
constexpr Duration kSimStep = 10ms;

// A source of the simulation. Its paths share its speed evenly and serve their slices in order.
struct SimSource {
  double bytes_per_second = 1e9;
  int paths = 1;
  Duration dies_at = Duration::max();
  Duration freezes_at = Duration::max();
  Duration joins_at{0};
  int lies_first = 0;        // so many of its slices do not verify
  double lies_one_in = 0;    // and then this share of them
  std::uint64_t served = 0;  // bytes landed
};

struct SimResult {
  Result<void> outcome;
  Duration took{0};
  std::vector<LostSource> lost;
  std::uint64_t starved = 0;
  BatchProgress progress;
};

// Drives a Scheduler as the engine does and checks what must hold at every step.
class Simulation {
 public:
  Simulation(SliceIndex slices, std::vector<SimSource> sources, BatchOptions options,
             std::uint64_t seed, std::function<SourceMask(SliceIndex)> candidates = nullptr)
      : options_(options),
        sources_(std::move(sources)),
        random_(seed),
        candidates_(std::move(candidates)),
        accepted_(slices),
        posts_(slices),
        writers_(slices),
        scheduler_(
            slices,
            [this](SliceIndex slice) {
              return SliceInfo{kSimSlice, candidates_ ? candidates_(slice) : SourceMask(~0ull)};
            },
            options, now()) {}

  void reconnect_slow_sources() { reconnect_ = true; }

  SimResult run(Duration at_most = 600s) {
    while (!scheduler_.outcome() && elapsed_ < at_most) {
      join_sources();
      post();
      elapsed_ += kSimStep;
      for (PathId id = 0; id < paths_.size(); ++id) advance(id);
      resolve();
      scheduler_.tick(now());
      for (const PathId id : scheduler_.take_aborts())
        paths_[id].abort_at = elapsed_ + drain_time();
      for (auto& lost : scheduler_.take_lost()) {
        // As a pull does: a source that was only slow is connected again after a while.
        SimSource& source = sources_[lost.source];
        if (reconnect_ && lost.cause.code() == ErrorCode::kUnavailable) {
          source.joins_at = elapsed_ + 500ms;
          joined_.erase(lost.source);
        }
        result_.lost.push_back(lost);
      }
      result_.starved += scheduler_.take_starved().has_value() ? 1 : 0;
    }
    if (const auto outcome = scheduler_.outcome()) {
      result_.outcome = *outcome;
    } else {
      std::string text = "the simulation did not end:";
      const BatchProgress progress = scheduler_.progress();
      for (const auto& source : progress.sources) {
        text +=
            fmt::format(" [{} B/s, {} paths, {} slices, lost {}]", source.goodput_bytes_per_second,
                        source.paths, source.slices, source.lost);
      }
      for (SliceIndex slice = 0; slice < accepted_.size(); ++slice) {
        if (accepted_[slice] == 0)
          text += fmt::format(" {}:w{}p{}", slice, writers_[slice], posts_[slice]);
      }
      result_.outcome = fail(ErrorCode::kInternal, "{}", text);
    }
    result_.took = elapsed_;
    result_.progress = scheduler_.progress();
    return result_;
  }

  const std::vector<SimSource>& sources() const { return sources_; }
  int accepted(SliceIndex slice) const { return accepted_[slice]; }
  int posts(SliceIndex slice) const { return posts_[slice]; }

 private:
  struct SimPath {
    SourceIndex source = 0;
    std::deque<SliceIndex> queue;
    double landed_of_front = 0;
    double landed = 0;
    Duration abort_at = Duration::max();
    bool closed = false;
  };

  TimePoint now() const { return TimePoint{} + 1s + elapsed_; }
  Duration drain_time() { return kSimStep * static_cast<int>(random_() % 4); }

  void join_sources() {
    for (SourceIndex i = 0; i < sources_.size(); ++i) {
      if (joined_.contains(i) || elapsed_ < sources_[i].joins_at) continue;
      joined_.insert(i);
      for (int n = 0; n < sources_[i].paths; ++n) {
        const PathId id = scheduler_.add_path(i, "path " + std::to_string(paths_.size()), now());
        ASSERT_EQ(id, paths_.size());
        paths_.push_back({.source = i});
      }
    }
  }

  void post() {
    while (const auto post = scheduler_.next_post(now())) {
      ASSERT_EQ(writers_[post->slice]++, 0) << "slice " << post->slice << " has two writers";
      ASSERT_EQ(accepted_[post->slice], 0) << "slice " << post->slice << " was accepted before";
      ASSERT_EQ(paths_[post->path].source, post->source);
      ASSERT_TRUE(!candidates_ || candidates_(post->slice).test(post->source));
      ++posts_[post->slice];
      paths_[post->path].queue.push_back(post->slice);
    }
  }

  void end_slice(PathId id, OpStatus status) {
    SimPath& path = paths_[id];
    const SliceIndex slice = path.queue.front();
    path.queue.pop_front();
    path.landed_of_front = 0;
    --writers_[slice];
    scheduler_.slice_done(id, slice, status, now());
    if (status == OpStatus::kOk) landed_.push_back({slice, path.source});
  }

  void end_path(PathId id, OpStatus status) {
    while (!paths_[id].queue.empty()) end_slice(id, status);
    paths_[id].closed = true;
    scheduler_.path_closed(id, "the connection broke");
  }

  void advance(PathId id) {
    SimPath& path = paths_[id];
    SimSource& source = sources_[path.source];
    if (path.closed) return;
    if (elapsed_ >= path.abort_at) return end_path(id, OpStatus::kAborted);
    if (elapsed_ >= source.dies_at) return end_path(id, OpStatus::kPeerLost);
    if (elapsed_ >= source.freezes_at || path.abort_at != Duration::max()) return;
    double budget = source.bytes_per_second / source.paths * seconds(kSimStep);
    while (budget > 0 && !path.queue.empty()) {
      const double part = std::min(budget, static_cast<double>(kSimSlice) - path.landed_of_front);
      path.landed_of_front += part;
      path.landed += part;
      budget -= part;
      source.served += static_cast<std::uint64_t>(part);
      if (path.landed_of_front + 0.5 < static_cast<double>(kSimSlice)) break;
      end_slice(id, OpStatus::kOk);
    }
    scheduler_.path_progress(id, static_cast<std::uint64_t>(path.landed), now());
  }

  // Verification finishes in any order, and not all at once.
  void resolve() {
    std::shuffle(landed_.begin(), landed_.end(), random_);
    std::size_t count = landed_.size() - (landed_.size() > 4 ? random_() % 3 : 0);
    for (; count > 0; --count) {
      const auto [slice, index] = landed_.back();
      landed_.pop_back();
      SimSource& source = sources_[index];
      std::bernoulli_distribution lies(source.lies_one_in);
      const bool bad = source.lies_first > 0 || lies(random_);
      source.lies_first -= source.lies_first > 0 ? 1 : 0;
      if (!bad) ++accepted_[slice];
      scheduler_.resolve(slice, bad ? Verdict::kRetry : Verdict::kAccept, now());
    }
  }

  const BatchOptions options_;
  std::vector<SimSource> sources_;
  std::mt19937_64 random_;
  const std::function<SourceMask(SliceIndex)> candidates_;
  std::vector<int> accepted_, posts_, writers_;
  std::vector<SimPath> paths_;
  std::set<SourceIndex> joined_;
  std::vector<std::pair<SliceIndex, SourceIndex>> landed_;
  bool reconnect_ = false;
  Duration elapsed_{0};
  Scheduler scheduler_;
  SimResult result_{.outcome = Result<void>()};
};

void expect_each_accepted_once(const Simulation& simulation, SliceIndex slices) {
  for (SliceIndex slice = 0; slice < slices; ++slice) {
    ASSERT_EQ(simulation.accepted(slice), 1) << "slice " << slice;
  }
}

TEST(Scheduler, RandomFleetsFetchEverySliceOnceWhateverHappensToAllSourcesButOne) {
  const std::uint64_t base = std::random_device{}();
  for (std::uint64_t seed = base; seed < base + testing::effort(3000); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const auto pick = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    std::vector<SimSource> sources(static_cast<std::size_t>(pick(1, 6)));
    for (std::size_t i = 0; i < sources.size(); ++i) {
      sources[i].bytes_per_second = std::pow(10.0, pick(60, 95) / 10.0);
      sources[i].paths = pick(1, 4);
      if (i == 0) continue;  // the one that can be relied on
      if (pick(0, 3) == 0) sources[i].dies_at = std::chrono::milliseconds(pick(0, 3000));
      if (pick(0, 5) == 0) sources[i].freezes_at = std::chrono::milliseconds(pick(0, 3000));
      if (pick(0, 4) == 0) sources[i].joins_at = std::chrono::milliseconds(pick(0, 2000));
      if (pick(0, 4) == 0) sources[i].lies_first = pick(1, 5);
    }
    sources[0].bytes_per_second = std::max(sources[0].bytes_per_second, 5e7);
    const auto slices = static_cast<SliceIndex>(pick(1, 150));
    BatchOptions options;
    options.first_slice = static_cast<SliceIndex>(pick(0, 300));
    Simulation simulation(slices, sources, options, seed);
    simulation.reconnect_slow_sources();  // a steal may cut the reliable one off near the end
    const SimResult result = simulation.run();
    ASSERT_FALSE(::testing::Test::HasFailure());
    ASSERT_TRUE(result.outcome) << result.outcome.error().message();
    expect_each_accepted_once(simulation, slices);
    EXPECT_EQ(result.progress.slices_done, slices);
    EXPECT_EQ(result.progress.bytes_done, slices * kSimSlice);
    for (SliceIndex slice = 0; slice < slices; ++slice) ASSERT_LE(simulation.posts(slice), 16);
  }
}

TEST(Scheduler, RandomFleetsThatFailFailWithACauseAndDrain) {
  const std::uint64_t base = std::random_device{}();
  for (std::uint64_t seed = base; seed < base + testing::effort(1000); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    std::vector<SimSource> sources(1 + random() % 4);
    for (auto& source : sources) {
      source.bytes_per_second = 1e8;
      source.paths = 1 + static_cast<int>(random() % 3);
      source.dies_at = std::chrono::milliseconds(random() % 300);
      source.lies_one_in = random() % 2 == 0 ? 0.5 : 0;
    }
    Simulation simulation(100, sources, {}, seed);
    const SimResult result = simulation.run();
    ASSERT_FALSE(::testing::Test::HasFailure());
    if (result.outcome) continue;
    EXPECT_EQ(result.outcome.error().code(), ErrorCode::kUnavailable);
    EXPECT_EQ(result.starved, 1u);
    EXPECT_LE(result.took, 400ms + 5s + 1s);
  }
}

// faults row 12
TEST(Scheduler, Row12ASourceAtOnePercentSpeedCostsAtMostHalfOfTheOthersTime) {
  for (const double fast : {2e8, 1e9, 5e9}) {
    for (const int others : {1, 3}) {
      for (const int paths : {1, 4}) {
        const auto slices =
            static_cast<SliceIndex>(2.0 * fast * others / kSimSlice);  // 2 s of work
        std::vector<SimSource> sources(static_cast<std::size_t>(others));
        for (auto& source : sources) source = {.bytes_per_second = fast, .paths = paths};
        const Duration alone = Simulation(slices, sources, {}, 1).run().took;
        sources.push_back({.bytes_per_second = fast / 100, .paths = paths});
        Simulation simulation(slices, sources, {}, 1);
        const SimResult result = simulation.run();
        ASSERT_TRUE(result.outcome) << result.outcome.error().message();
        expect_each_accepted_once(simulation, slices);
        EXPECT_LE(result.took * 2, alone * 3)
            << others << " sources of " << fast << " B/s, " << paths << " paths: alone "
            << seconds(alone) << " s, with the slow one " << seconds(result.took) << " s";
      }
    }
  }
}

TEST(Scheduler, SourcesServeInProportionToTheirSpeed) {
  std::vector<SimSource> sources = {{.bytes_per_second = 4e8}, {.bytes_per_second = 1e8}};
  Simulation simulation(1000, sources, {}, 1);
  ASSERT_TRUE(simulation.run().outcome);
  const double ratio = static_cast<double>(simulation.sources()[0].served) /
                       static_cast<double>(simulation.sources()[1].served);
  EXPECT_GT(ratio, 3.0);
  EXPECT_LT(ratio, 5.5);
}

TEST(Scheduler, AFrozenSourceIsLostByTheProgressDeadlineAndTheOthersFinish) {
  std::vector<SimSource> sources = {{.bytes_per_second = 1e8},
                                    {.bytes_per_second = 1e8, .paths = 3, .freezes_at = 500ms}};
  Simulation simulation(300, sources, {}, 1);
  const SimResult result = simulation.run();
  ASSERT_TRUE(result.outcome) << result.outcome.error().message();
  ASSERT_EQ(result.lost.size(), 1u);
  EXPECT_EQ(result.lost[0].source, 1u);
  EXPECT_EQ(result.lost[0].cause.code(), ErrorCode::kTimeout);
}

TEST(Scheduler, Row9TheSecondRejectedSliceQuarantinesItsSource) {
  std::vector<SimSource> sources = {{.bytes_per_second = 1e8},
                                    {.bytes_per_second = 1e8, .paths = 2, .lies_first = 1000}};
  Simulation simulation(200, sources, {}, 1);
  const SimResult result = simulation.run();
  ASSERT_TRUE(result.outcome) << result.outcome.error().message();
  ASSERT_EQ(result.lost.size(), 1u);
  EXPECT_EQ(result.lost[0].source, 1u);
  EXPECT_EQ(result.lost[0].cause.code(), ErrorCode::kCorrupt);
  EXPECT_EQ(result.progress.sources[1].slices, 0u);
}

TEST(Scheduler, ASliceThatNobodyDeliversIntactFailsTheBatchAfterItsAttempts) {
  BatchOptions options;
  options.max_attempts = 3;
  options.strikes_to_quarantine = 1000;
  Simulation simulation(1, {{.lies_first = 1000}, {.lies_first = 1000}}, options, 1);
  const SimResult result = simulation.run();
  ASSERT_FALSE(result.outcome);
  EXPECT_NE(result.outcome.error().message().find("slice 0 failed 3 times"), std::string::npos);
  EXPECT_EQ(simulation.posts(0), 3);
}

TEST(Scheduler, ASliceOfASlowSourceWithItsOwnSlicesIsNotBoughtWithThem) {
  // Only source 1 holds the odd slices: its single path must not be cut for the sake of the others.
  std::vector<SimSource> sources = {{.bytes_per_second = 1e9}, {.bytes_per_second = 1e7}};
  Simulation simulation(40, sources, {}, 1,
                        [](SliceIndex slice) { return SourceMask(slice % 2 == 0 ? 3 : 2); });
  const SimResult result = simulation.run();
  ASSERT_TRUE(result.outcome) << result.outcome.error().message();
  EXPECT_TRUE(result.lost.empty());
}

TEST(Scheduler, ALateSourceRescuesAStarvingBatch) {
  std::vector<SimSource> sources = {{.dies_at = 20ms}, {.joins_at = 3s}};
  Simulation simulation(50, sources, {}, 1);
  const SimResult result = simulation.run();
  ASSERT_TRUE(result.outcome) << result.outcome.error().message();
  EXPECT_EQ(result.starved, 1u);
}

TEST(Scheduler, ABatchWithoutSourcesFailsAfterTheStarvationTimeoutNamingItsSlices) {
  Simulation simulation(7, {}, {}, 1);
  const SimResult result = simulation.run();
  ASSERT_FALSE(result.outcome);
  EXPECT_EQ(result.starved, 1u);
  EXPECT_NE(result.outcome.error().message().find("7 of 7 slices"), std::string::npos);
  EXPECT_GE(result.took, 5s);
}

TEST(Scheduler, AnEmptyBatchHasSucceeded) {
  Simulation simulation(0, {}, {}, 1);
  EXPECT_TRUE(simulation.run().outcome);
}

TEST(Scheduler, ASourceWhoseLastSlicesWereTakenIsNotCalledSilent) {
  std::vector<SimSource> sources = {{.bytes_per_second = 1e5}, {.bytes_per_second = 1e9}};
  Simulation simulation(50, sources, {}, 1);
  const SimResult result = simulation.run();
  ASSERT_TRUE(result.outcome) << result.outcome.error().message();
  ASSERT_EQ(result.lost.size(), 1u);
  EXPECT_EQ(result.lost[0].source, 0u);
  EXPECT_EQ(result.lost[0].cause.code(), ErrorCode::kUnavailable);
  EXPECT_GT(result.progress.stolen_slices, 0u);
}

}  // namespace
}  // namespace rekindle::transport
