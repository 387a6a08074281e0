#include "tests/transport/schedule/schedule_fixture.h"
#include "transport/schedule/slice_picker.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

// Slices 2n and 2n + 1 share a buffer.
class StagingGateTest : public ScheduleFixture {
 protected:
  StagingGateTest() {
    for (SliceIndex slice = 0; slice < infos.size(); ++slice) {
      infos[slice].group_first = slice & ~1u;
      infos[slice].group_size = 2;
    }
  }
  void post_slice(SliceIndex slice) {
    slices.post(slice, 0);
    gate.group_changed(infos[slice]);
  }
  void refuse(SliceIndex slice) {
    slices.reopen(slice);
    gate.group_changed(infos[slice]);
    gate.refused(slice, now);
  }
  std::optional<SliceIndex> next() {
    return gate.next_of_begun_group([](SliceIndex, const SliceInfo&) { return true; });
  }

  StagingGate gate{slices, 5s};
};

TEST_F(StagingGateTest, TheRestOfABegunGroupGoesFirst) {
  EXPECT_FALSE(next());
  post_slice(5);
  EXPECT_EQ(next(), SliceIndex{4});
  post_slice(4);
  EXPECT_FALSE(next());
}

TEST_F(StagingGateTest, WhileMemoryIsShortOnlyBegunGroupsArePosted) {
  post_slice(0);
  post_slice(2);
  refuse(2);
  EXPECT_TRUE(gate.is_short());
  EXPECT_FALSE(gate.nothing_may_be_posted());
  EXPECT_EQ(next(), SliceIndex{1});
  post_slice(1);
  EXPECT_TRUE(gate.nothing_may_be_posted());
  gate.freed();
  EXPECT_FALSE(gate.is_short());
}

TEST_F(StagingGateTest, ASliceThatWasRefusedIsNotTriedAgainUntilMemoryIsFreed) {
  post_slice(0);
  post_slice(1);
  refuse(1);
  EXPECT_FALSE(next());
  gate.freed();
  EXPECT_EQ(next(), SliceIndex{1});
}

TEST_F(StagingGateTest, WithNothingUnderWayItIsTriedAtEachTickAndEndsAfterItsPatience) {
  for (int i = 0; i < 5; ++i) {
    post_slice(0);
    refuse(0);
    EXPECT_FALSE(gate.tick(now));
    EXPECT_FALSE(gate.is_short());
    now += 1s;
  }
  post_slice(0);
  refuse(0);
  const auto error = gate.tick(now);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kExhausted);
}

TEST_F(StagingGateTest, SlicesUnderWayMayFreeMemoryYet) {
  post_slice(0);
  post_slice(2);
  refuse(2);
  EXPECT_FALSE(gate.tick(now += 60s));
  EXPECT_TRUE(gate.is_short());
}

TEST_F(StagingGateTest, MemoryHeldByHalvesIsNoWantOfMemory) {
  post_slice(0);
  slices.land(0);
  slices.accept(0);
  post_slice(2);
  refuse(2);
  EXPECT_FALSE(gate.tick(now));
  post_slice(2);
  refuse(2);
  const auto error = gate.tick(now += 5s);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace rekindle::transport
