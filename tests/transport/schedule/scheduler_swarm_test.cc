// The engine's policy with sources that are being filled: what is taken from whom, and when waiting
// for them ends.
#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "transport/schedule/scheduler.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSwarmSlice = 1 * kMiB;

// Source 0 holds everything; the others what they are told to have gained.
class SwarmScheduler : public ::testing::Test {
 protected:
  void start(SliceIndex slices, std::uint64_t source_window = 64 * kMiB, bool with_source = true) {
    candidates_.assign(slices, SourceMask(with_source ? 1 : 0));
    prospects_.assign(slices, SourceMask());
    options_.window_bytes = source_window;
    scheduler_ = std::make_unique<Scheduler>(
        slices,
        [this](SliceIndex slice) {
          return SliceInfo{kSwarmSlice, candidates_[slice], prospects_[slice], slice, 1, slice};
        },
        options_, now_);
  }
  PathId connect(SourceIndex source) {
    if (source != 0) {
      for (auto& mask : prospects_) mask.set(source);
      scheduler_->add_neighbour(source, order_seeds_[source]);
    }
    return scheduler_->add_path(source, "path of " + std::to_string(source), now_);
  }
  void gain(SourceIndex source, const std::vector<SliceIndex>& slices) {
    for (const SliceIndex slice : slices) candidates_[slice].set(source);
    scheduler_->candidates_added(source, slices, now_);
  }
  // The slices that are asked of a source until nothing more is.
  std::map<SourceIndex, std::vector<SliceIndex>> posts() {
    std::map<SourceIndex, std::vector<SliceIndex>> all;
    while (const auto post = scheduler_->next_post(now_)) {
      all[post->source].push_back(post->slice);
      path_of_[post->slice] = post->path;
    }
    return all;
  }
  void finish(SliceIndex slice) {
    scheduler_->slice_done(path_of_.at(slice), slice, OpStatus::kOk, now_);
    scheduler_->resolve(slice, Verdict::kAccept, now_);
  }
  void pass(Duration time) {
    for (const TimePoint end = now_ + time; now_ < end;) scheduler_->tick(now_ += 10ms);
  }

  TimePoint now_{1s};
  BatchOptions options_;
  std::map<SourceIndex, std::uint64_t>
      order_seeds_;  // of neighbours; equal to ours: all is our part
  std::vector<SourceMask> candidates_;
  std::vector<SourceMask> prospects_;
  std::map<SliceIndex, PathId> path_of_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(SwarmScheduler, SlicesAreWantedInTheOrderThatIsGiven) {
  options_.order = {3, 1, 0, 2};
  start(4);
  connect(0);
  EXPECT_EQ(posts()[0], (std::vector<SliceIndex>{3, 1, 0, 2}));
}

TEST_F(SwarmScheduler, WhatANeighbourHasIsTakenFromItAndTheRestFromTheSource) {
  start(6);
  connect(0);
  connect(1);
  gain(1, {1, 4});
  const auto all = posts();
  EXPECT_EQ(std::set(all.at(1).begin(), all.at(1).end()), (std::set<SliceIndex>{1, 4}));
  EXPECT_EQ(all.at(0), (std::vector<SliceIndex>{0, 2, 3, 5}));
}

TEST_F(SwarmScheduler, TheSourceIsAskedFirstForWhatNoNeighbourHolds) {
  start(40, 2 * kMiB);  // room for two slices at each
  connect(0);
  connect(1);
  std::vector<SliceIndex> first_half;
  for (SliceIndex slice = 0; slice < 20; ++slice) first_half.push_back(slice);
  gain(1, first_half);
  const auto all = posts();
  EXPECT_EQ(all.at(0), (std::vector<SliceIndex>{20, 21}));
  ASSERT_EQ(all.at(1).size(), 2u);
  for (const SliceIndex slice : all.at(1)) EXPECT_LT(slice, 20u);
}

// What is asked of the source, in order, by a puller with this order seed whose neighbour has
// another and gains nothing.
std::vector<SliceIndex> asked_by(std::uint64_t seed, std::uint64_t neighbours_seed,
                                 SliceIndex slices) {
  TimePoint now{1s};
  BatchOptions options;
  options.order_seed = seed;
  Scheduler scheduler(
      slices,
      [](SliceIndex slice) {
        return SliceInfo{kSwarmSlice, SourceMask(1), SourceMask(2), slice, 1, slice};
      },
      options, now);
  scheduler.add_path(0, "source", now);
  scheduler.add_neighbour(1, neighbours_seed);
  scheduler.add_path(1, "neighbour", now);
  std::vector<SliceIndex> asked;
  while (const auto post = scheduler.next_post(now)) {
    asked.push_back(post->slice);
    scheduler.slice_done(post->path, post->slice, OpStatus::kOk, now);
    scheduler.resolve(post->slice, Verdict::kAccept, now);
  }
  return asked;
}

TEST(SwarmParts, TwoPullersBeginWithPartsThatAreDifferentAndTogetherEverything) {
  constexpr SliceIndex kSlices = 100;
  const auto ours = asked_by(17, 4711, kSlices);
  const auto theirs = asked_by(4711, 17, kSlices);
  ASSERT_EQ(ours.size(), kSlices);
  ASSERT_EQ(theirs.size(), kSlices);
  std::vector<SliceIndex> sizes;  // of our part, with which it would be so
  for (SliceIndex mine = 1; mine < kSlices; ++mine) {
    std::set<SliceIndex> both(ours.begin(), ours.begin() + mine);
    both.insert(theirs.begin(), theirs.end() - mine);
    if (both.size() == kSlices) sizes.push_back(mine);
  }
  ASSERT_FALSE(sizes.empty());
  EXPECT_GT(sizes.front(), kSlices / 4);
  EXPECT_LT(sizes.back(), kSlices * 3 / 4);
}

TEST_F(SwarmScheduler, TheOrderOfTheBatchHoldsWithinOurPartAndForAllOfItOnceTheNeighbourIsGone) {
  constexpr SliceIndex kSlices = 64;
  options_.order_seed = 17;
  order_seeds_[1] = 4711;
  start(kSlices, kSwarmSlice);
  connect(0);
  const PathId neighbour = connect(1);
  std::vector<SliceIndex> asked;
  const auto ask = [&] {
    asked.push_back(posts().at(0).at(0));
    finish(asked.back());
  };
  for (int i = 0; i < 10; ++i) ask();
  EXPECT_TRUE(std::is_sorted(asked.begin(), asked.end()));
  EXPECT_GT(asked.back(), 10u) << "some are the neighbour's";
  scheduler_->path_closed(neighbour, "killed");
  std::set<SliceIndex> left;
  for (SliceIndex slice = 0; slice < kSlices; ++slice) left.insert(slice);
  for (const SliceIndex slice : asked) left.erase(slice);
  asked.clear();
  while (!scheduler_->outcome()) ask();
  EXPECT_EQ(asked, std::vector<SliceIndex>(left.begin(), left.end()));
}

TEST(FirstWindow, GrowsByWhatHasComeUntilTheSourceIsMeasured) {
  TimePoint now{1s};
  Scheduler scheduler(
      100,
      [](SliceIndex) {
        return SliceInfo{kSwarmSlice, SourceMask(1)};
      },
      {}, now);
  const PathId path = scheduler.add_path(0, "source", now);
  std::vector<SliceIndex> in_flight;
  const auto ask = [&] {
    while (const auto post = scheduler.next_post(now)) in_flight.push_back(post->slice);
    return in_flight.size();
  };
  EXPECT_EQ(ask(), 4u);
  EXPECT_EQ(ask(), 4u);
  for (std::uint64_t landed = 1; landed <= 3; ++landed) {
    scheduler.path_progress(path, landed * kSwarmSlice, now);
    scheduler.slice_done(path, in_flight.back(), OpStatus::kOk, now);
    scheduler.resolve(in_flight.back(), Verdict::kAccept, now);
    in_flight.pop_back();
    EXPECT_EQ(ask(), 4u + landed);
  }
}

TEST_F(SwarmScheduler, TheRarestOfWhatANeighbourHasGoesFirst) {
  start(6, 1 * kMiB, false);
  connect(1);
  connect(2);
  connect(3);
  gain(2, {0, 1, 2});
  gain(3, {0, 1});
  gain(1, {0, 1, 2, 3});
  EXPECT_EQ(posts().at(1), (std::vector<SliceIndex>{3}));  // nobody else has it
}

TEST_F(SwarmScheduler, WhatADeadNeighbourHeldIsAskedOfTheSourceAgain) {
  start(4, 1 * kMiB);
  connect(0);
  const PathId neighbour = connect(1);
  gain(1, {0, 1});
  auto all = posts();
  EXPECT_EQ(all.at(0), (std::vector<SliceIndex>{2}));
  const SliceIndex lost = all.at(1).at(0);
  scheduler_->slice_done(neighbour, lost, OpStatus::kPeerLost, now_);
  scheduler_->path_closed(neighbour, "killed");
  std::vector<SliceIndex> rest;
  for (SliceIndex slice = 2; rest.size() < 4;) {
    finish(slice);
    rest.push_back(slice);
    all = posts();
    if (rest.size() < 4) slice = all.at(0).at(0);
  }
  EXPECT_EQ(rest, (std::vector<SliceIndex>{2, lost, lost == 0 ? 1u : 0u, 3}));
  ASSERT_TRUE(scheduler_->outcome());
  EXPECT_TRUE(*scheduler_->outcome());
}

TEST_F(SwarmScheduler, ASliceThatNobodyHeldIsFetchedWhenANeighbourHasGainedIt) {
  start(2, 64 * kMiB, false);
  connect(1);
  EXPECT_TRUE(posts().empty());
  pass(1500ms);
  EXPECT_FALSE(scheduler_->outcome());
  EXPECT_FALSE(scheduler_->take_starved()) << "it is to be expected from a neighbour";
  gain(1, {1});
  EXPECT_EQ(posts().at(1), (std::vector<SliceIndex>{1}));
  finish(1);
  pass(1500ms);
  gain(1, {0});
  EXPECT_EQ(posts().at(1), (std::vector<SliceIndex>{0}));
  finish(0);
  ASSERT_TRUE(scheduler_->outcome());
  EXPECT_TRUE(*scheduler_->outcome());
}

TEST_F(SwarmScheduler, WaitingForNeighboursThatGainNothingEnds) {
  start(2, 64 * kMiB, false);
  const PathId path = connect(1);
  pass(1900ms);
  EXPECT_TRUE(scheduler_->take_aborts().empty());
  pass(200ms);
  ASSERT_EQ(scheduler_->take_aborts(), (std::vector<PathId>{path}));
  ASSERT_TRUE(scheduler_->outcome());
  ASSERT_FALSE(*scheduler_->outcome());
  EXPECT_EQ(scheduler_->outcome()->error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(scheduler_->outcome()->error().message().find("held by nobody"), std::string::npos);
}

TEST_F(SwarmScheduler, ABatchWhoseLastProspectIsGoneStarves) {
  start(2, 64 * kMiB, false);
  const PathId path = connect(1);
  scheduler_->path_closed(path, "killed");
  scheduler_->tick(now_ += 10ms);
  EXPECT_EQ(scheduler_->take_starved(), 2u);
}

TEST_F(SwarmScheduler, AnIdleNeighbourTakesNoSliceFromTheSourceWhileThereIsMoreToCome) {
  start(40, 4 * kMiB);
  const PathId paths[] = {connect(0), connect(0)};
  const PathId neighbour = connect(1);
  gain(1, {0});
  const auto all = posts();
  const auto at_source = all.at(0);
  for (int i = 0; i < 20; ++i) {  // it is measured as fast
    scheduler_->path_progress(neighbour, static_cast<std::uint64_t>(i + 1) * kSwarmSlice / 20,
                              now_);
    for (const PathId path : paths) {
      scheduler_->path_progress(path, static_cast<std::uint64_t>(i + 1) * 100, now_);
    }
    scheduler_->tick(now_ += 10ms);
  }
  finish(0);
  for (const SliceIndex slice : at_source) candidates_[slice].set(1);  // it has gained them, too
  for (int i = 0; i < 60; ++i) {
    for (const PathId path : paths) {
      scheduler_->path_progress(path, static_cast<std::uint64_t>(i + 30) * 100, now_);
    }
    scheduler_->tick(now_ += 10ms);
  }
  EXPECT_TRUE(scheduler_->take_aborts().empty());
}

// Two neighbours hold the last two slices; one of them turns slow with one of them in flight.
TEST_F(SwarmScheduler, Row12TheLastSliceOfASlowNeighbourIsTakenByOneThatHoldsItToo) {
  start(2, 1 * kMiB, false);
  const PathId slow = connect(1);
  const PathId fast = connect(2);
  gain(1, {0, 1});
  gain(2, {0, 1});
  auto all = posts();
  ASSERT_EQ(all.at(1).size(), 1u);
  ASSERT_EQ(all.at(2).size(), 1u);
  const SliceIndex stuck = all.at(1).at(0);
  const SliceIndex other = all.at(2).at(0);
  for (std::uint64_t i = 1; i <= 20; ++i) {
    scheduler_->path_progress(fast, i * kSwarmSlice / 20, now_);
    scheduler_->path_progress(slow, i * kSwarmSlice / 2000, now_);
    scheduler_->tick(now_ += 10ms);
  }
  finish(other);
  std::vector<PathId> aborts;
  for (std::uint64_t i = 21; i <= 60 && aborts.empty(); ++i) {
    scheduler_->path_progress(slow, i * kSwarmSlice / 2000, now_);
    scheduler_->tick(now_ += 10ms);
    aborts = scheduler_->take_aborts();
  }
  ASSERT_EQ(aborts, (std::vector<PathId>{slow}));
  EXPECT_TRUE(posts().empty()) << "one writer at a time: not before the slow path has drained";
  scheduler_->slice_done(slow, stuck, OpStatus::kAborted, now_);
  scheduler_->path_closed(slow, "aborted");
  const auto lost = scheduler_->take_lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].cause.code(), ErrorCode::kUnavailable) << "slow, not guilty";
  EXPECT_EQ(posts().at(2), (std::vector<SliceIndex>{stuck}));
  finish(stuck);
  ASSERT_TRUE(scheduler_->outcome());
  EXPECT_TRUE(*scheduler_->outcome());
}

}  // namespace
}  // namespace rekindle::transport
