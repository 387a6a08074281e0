// A pipeline whose spread is the test's: what is handed over, and how it goes on without.
#include <atomic>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

#include "src/base/clock.h"
#include "src/bucket/double_stream.h"
#include "src/bucket/pipeline.h"
#include "tests/bucket/pipeline_rig.h"
#include "tests/bucket/sample.h"

namespace rekindle::bucket {
namespace {

using namespace std::chrono_literals;
using testing::Rig;
using testing::sample_of;

// A spread that ends when it is let, well or not.
class Gated final : public Spread {
 public:
  Result<void> enqueue(std::size_t, DeviceAddress, Stream& stream) override {
    return push_work(stream, [open = open_](const std::atomic<bool>& stop) {
      while (!open->load() && !stop.load()) std::this_thread::sleep_for(20us);
      return open->load();
    });
  }
  Result<void> check() override {
    ++checked;
    if (!broken) return {};
    return fail(ErrorCode::kPeerLost, "a rank is gone");
  }
  void open() { open_->store(true); }
  bool broken = false;
  int checked = 0;

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

struct GatedRig {
  explicit GatedRig(PipelineOptions options = {.release_deadline = 400s, .fill_deadline = 200s})
      : rig(sample_of({{"w", DType::kU8, {100'000}}}, 1), {}, {.bucket_bytes = 4096}, &spread,
            options),
        tail(rig.plan, rig.pinner, rig.segments(), rig.contents.tiles().tile_count()) {
    rig.fetch.mark_all_ready();
    tail.mark_all_ready();
  }
  // The tail brings all of it once more.
  Result<void> go_on() {
    return rig.pipeline.go_on_without_spread(rig.plan.size(), tail, steady_now() + 10s);
  }
  void fill_the_slots() { rig.run(Pipeline::State::kReleasing); }
  Result<Pipeline::State> step_until_error() {
    const TimePoint give_up = steady_now() + 60s;
    for (;;) {
      auto state = rig.pipeline.step(steady_now());
      if (!state || *state == Pipeline::State::kDone || steady_now() > give_up) return state;
      std::this_thread::sleep_for(20us);
    }
  }
  Gated spread;
  Rig rig;
  SegmentFetch tail;
};

TEST(PipelineSpread, WhatIsSpreadIsHandedOverOnceItIsHere) {
  GatedRig gated;
  Rig& rig = gated.rig;
  gated.fill_the_slots();
  EXPECT_EQ(rig.consumer.most_held, 0u);
  EXPECT_EQ(rig.pipeline.handed_over(), 0u);
  EXPECT_EQ(gated.spread.checked, 0);
  EXPECT_TRUE(rig.pipeline.awaits_hand_over());
  ASSERT_TRUE(rig.pipeline.deadline());
  gated.spread.open();
  EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
  EXPECT_EQ(rig.pipeline.handed_over(), rig.plan.size());
  EXPECT_EQ(gated.spread.checked, static_cast<int>(rig.plan.size()));
  EXPECT_FALSE(rig.pipeline.awaits_hand_over());
  rig.expect_all_arrived();
}

// Is slow, until it is let.
class SlowKeep final : public Keep {
 public:
  Result<void> offer(std::size_t, std::uint32_t, DeviceAddress, TimePoint) override {
    ++offered;
    return {};
  }
  Result<bool> done(std::uint32_t) override { return willing; }
  Result<void> drain(TimePoint) override {
    ++drained;
    return {};
  }
  std::size_t offered = 0;
  int drained = 0;
  bool willing = false;
};

TEST(PipelineSpread, ASlotIsFilledAgainOnceItHasBeenKeptToo) {
  GatedRig gated;
  Rig& rig = gated.rig;
  SlowKeep keep;
  rig.pipeline.keep_with(keep);
  gated.spread.open();
  const TimePoint give_up = steady_now() + 60s;
  while (keep.offered < 3) {
    ASSERT_TRUE(rig.pipeline.step(steady_now()));
    ASSERT_LT(steady_now(), give_up);
  }
  EXPECT_EQ(rig.run(Pipeline::State::kReleasing), Pipeline::State::kReleasing);
  EXPECT_EQ(keep.offered, 3u) << "every slot is kept from";
  EXPECT_TRUE(rig.pipeline.awaits_keep());
  EXPECT_EQ(rig.pipeline.delivered(), 0u);
  keep.willing = true;
  EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
  EXPECT_EQ(keep.offered, rig.plan.size());
  EXPECT_FALSE(rig.pipeline.awaits_keep());
  rig.expect_all_arrived();
  EXPECT_GT(keep.drained, 0);
}

TEST(PipelineSpread, ADeviceThatDoesNotEndItsCopiesToTheHostIsGivenUpByTheDeadline) {
  GatedRig gated({.release_deadline = 400s, .fill_deadline = 200s});
  SlowKeep keep;
  gated.rig.pipeline.keep_with(keep);
  gated.spread.open();
  const TimePoint begin = steady_now() + 1000s;  // ahead of the clock: the test owns time
  const TimePoint give_up = steady_now() + 60s;
  while (keep.offered < 3) {
    ASSERT_TRUE(gated.rig.pipeline.step(begin));
    ASSERT_LT(steady_now(), give_up);
  }
  ASSERT_TRUE(gated.rig.pipeline.deadline());
  EXPECT_EQ(*gated.rig.pipeline.deadline(), begin + 200s);
  const auto late = gated.rig.pipeline.step(begin + 200s);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kInternal);
}

TEST(PipelineSpread, Row43WhatIsBeingKeptIsDoneBeforeTheRestComesOtherwise) {
  GatedRig gated;
  Rig& rig = gated.rig;
  SlowKeep keep;
  rig.pipeline.keep_with(keep);
  gated.spread.open();
  const TimePoint give_up = steady_now() + 60s;
  while (keep.offered < 3) {
    ASSERT_TRUE(rig.pipeline.step(steady_now()));
    ASSERT_LT(steady_now(), give_up);
  }
  ASSERT_TRUE(gated.go_on());
  EXPECT_EQ(keep.drained, 1);
  EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
  EXPECT_EQ(keep.offered, 3u) << "what comes from the segments is there";
  EXPECT_EQ(rig.pipeline.delivered(), 3 + rig.plan.size());
  rig.expect_all_arrived();
}

TEST(PipelineSpread, WithoutASpreadNothingAwaitsIt) {
  Rig rig(sample_of({{"w", DType::kU8, {100'000}}}, 1), {}, {.bucket_bytes = 4096});
  rig.consumer.willing = false;
  rig.fetch.mark_all_ready();
  rig.run(Pipeline::State::kReleasing);
  EXPECT_FALSE(rig.pipeline.awaits_hand_over());
  EXPECT_EQ(rig.pipeline.handed_over(), rig.consumer.most_held);
}

TEST(PipelineSpread, Row43ASpreadWithoutProgressEndsByTheDeadline) {
  GatedRig gated;
  const TimePoint begin = steady_now() + 1000s;  // ahead of the clock: the test owns time
  while (!gated.rig.pipeline.deadline()) ASSERT_TRUE(gated.rig.pipeline.step(begin));
  EXPECT_EQ(*gated.rig.pipeline.deadline(), begin + 200s);
  EXPECT_TRUE(gated.rig.pipeline.step(begin + 199s));
  const auto late = gated.rig.pipeline.step(begin + 200s);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kTimeout);
  gated.spread.open();
}

TEST(PipelineSpread, Row43WhatASpreadThatFailedLeftIsNotHandedOver) {
  GatedRig gated;
  Rig& rig = gated.rig;
  gated.fill_the_slots();
  gated.spread.broken = true;
  gated.spread.open();
  const auto failed = gated.step_until_error();
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code(), ErrorCode::kPeerLost);
  EXPECT_EQ(rig.pipeline.handed_over(), 0u);
  ASSERT_TRUE(gated.go_on());
  EXPECT_FALSE(rig.pipeline.awaits_hand_over());
  EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
  EXPECT_EQ(rig.pipeline.delivered(), rig.plan.size());
  rig.expect_all_arrived();
}

TEST(PipelineSpread, Row43WhatTheConsumerHasStaysItsOwnWhileTheRestComesOtherwise) {
  GatedRig gated;
  Rig& rig = gated.rig;
  gated.spread.open();
  rig.consumer.willing = false;
  const TimePoint give_up = steady_now() + 60s;
  while (rig.pipeline.handed_over() < 3) {
    ASSERT_TRUE(rig.pipeline.step(steady_now()));
    ASSERT_LT(steady_now(), give_up);
  }
  ASSERT_TRUE(gated.go_on());
  EXPECT_EQ(rig.run(Pipeline::State::kReleasing), Pipeline::State::kReleasing);
  EXPECT_EQ(rig.pipeline.handed_over(), 3u) << "every slot is the consumer's";
  rig.consumer.willing = true;
  EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
  EXPECT_EQ(rig.pipeline.delivered(), 3 + rig.plan.size());
  rig.expect_all_arrived();
}

TEST(PipelineSpread, ASpreadThatIsOverMayBeFollowedByNothing) {
  GatedRig gated;
  gated.spread.open();
  gated.rig.run(Pipeline::State::kDone);
  ASSERT_TRUE(gated.rig.pipeline.go_on_without_spread(0, gated.tail, steady_now() + 10s));
  EXPECT_EQ(gated.rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
  EXPECT_EQ(gated.rig.pipeline.delivered(), gated.rig.plan.size());
}

TEST(PipelineSpread, Row43ASpreadThatDoesNotEndIsNotGoneOnWithout) {
  GatedRig gated;
  gated.fill_the_slots();
  const auto stuck = gated.rig.pipeline.go_on_without_spread(1, gated.tail, steady_now() + 20ms);
  ASSERT_FALSE(stuck);
  EXPECT_EQ(stuck.error().code(), ErrorCode::kTimeout);
  gated.spread.open();
  EXPECT_TRUE(gated.rig.pipeline.drain(steady_now() + 10s));
}

}  // namespace
}  // namespace rekindle::bucket
