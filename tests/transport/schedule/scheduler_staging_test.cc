// The engine's policy where slices share staging memory and there is little of it.
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/support/effort.h"
#include "transport/schedule/scheduler.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kStagedSlice = 1 * kMiB;
constexpr std::size_t kBuffers = 8;

// Tiles in two halves: source 0 holds all first halves, source 1 all second ones, source 2 is being
// filled and may hold any. A tile takes a buffer with its first half and frees it with the second.
class StagedTiles {
 public:
  StagedTiles(SliceIndex tiles, std::uint64_t seed) : random_(seed), prospects_(2 * tiles) {
    for (SliceIndex slice = 0; slice < 2 * tiles; ++slice) {
      candidates_.push_back(SourceMask(slice % 2 == 0 ? 1 : 2));
    }
    BatchOptions options;
    options.order_seed = seed;
    scheduler_ = std::make_unique<Scheduler>(
        2 * tiles,
        [this](SliceIndex slice) {
          return SliceInfo{kStagedSlice, candidates_[slice], prospects_[slice], slice & ~1u, 2};
        },
        options, now_);
  }
  void connect(SourceIndex source) { scheduler_->add_path(source, "path", now_); }
  void neighbour_gains_everything() {
    std::vector<SliceIndex> all;
    for (SliceIndex slice = 0; slice < candidates_.size(); ++slice) {
      candidates_[slice].set(2);
      all.push_back(slice);
    }
    scheduler_->add_neighbour(2, 0);
    scheduler_->candidates_added(2, all, now_);
  }
  void nobody_brings_second_halves_but_perhaps_the_neighbour() {
    for (SliceIndex slice = 1; slice < candidates_.size(); slice += 2) {
      candidates_[slice] = {};
      prospects_[slice].set(2);
    }
    scheduler_->add_neighbour(2, 0);
  }
  // One look of the engine, and some of what is in flight lands.
  void step() {
    while (const auto post = scheduler_->next_post(now_)) {
      auto& halves = staged_[post->slice / 2];
      if (halves == 0 && staged_.size() > kBuffers) {
        staged_.erase(post->slice / 2);
        scheduler_->unpost(post->path, post->slice, now_);
        break;
      }
      ++halves;
      in_flight_.push_back(*post);
    }
    std::shuffle(in_flight_.begin(), in_flight_.end(), random_);
    for (std::size_t count = in_flight_.size() - in_flight_.size() / 2; count > 0; --count) {
      const auto post = in_flight_.back();
      in_flight_.pop_back();
      scheduler_->slice_done(post.path, post.slice, OpStatus::kOk, now_);
      if (++landed_[post.slice / 2] == 2) staged_.erase(post.slice / 2);
      scheduler_->resolve(post.slice, Verdict::kAccept, now_);
    }
    scheduler_->tick(now_ += 10ms);
  }
  std::optional<Result<void>> run(Duration at_most) {
    for (const TimePoint end = now_ + at_most; now_ < end && !scheduler_->outcome();) step();
    return scheduler_->outcome();
  }

 private:
  TimePoint now_{1s};
  std::mt19937_64 random_;
  std::vector<SourceMask> candidates_;
  std::vector<SourceMask> prospects_;
  std::map<SliceIndex, int> staged_;  // halves that are in a tile's buffer or on their way
  std::map<SliceIndex, int> landed_;
  std::vector<Scheduler::Post> in_flight_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST(SchedulerStaging, ANeighbourThatHoldsBothHalvesOfManyTilesDoesNotUseUpTheMemoryWithHalves) {
  for (std::uint64_t seed = 0; seed < testing::effort(200); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    StagedTiles tiles(100, seed);
    tiles.connect(0);
    tiles.connect(1);
    tiles.step();
    tiles.neighbour_gains_everything();
    tiles.connect(2);
    const auto outcome = tiles.run(60s);
    ASSERT_TRUE(outcome) << "it hangs";
    ASSERT_TRUE(*outcome) << outcome->error().message();
  }
}

// Not kExhausted, which would end the pull: another plan may have other sources.
TEST(SchedulerStaging, MemoryThatIsHeldByHalvesWhoseOthersNobodyBringsIsNoWantOfMemory) {
  StagedTiles tiles(100, 1);
  tiles.nobody_brings_second_halves_but_perhaps_the_neighbour();
  tiles.connect(0);
  tiles.connect(2);
  const auto outcome = tiles.run(60s);
  ASSERT_TRUE(outcome) << "it hangs";
  ASSERT_FALSE(*outcome);
  EXPECT_EQ(outcome->error().code(), ErrorCode::kUnavailable) << outcome->error().message();
}

}  // namespace
}  // namespace rekindle::transport
