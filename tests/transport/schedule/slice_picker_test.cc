#include "transport/schedule/slice_picker.h"

#include "tests/transport/schedule/schedule_fixture.h"

namespace rekindle::transport {
namespace {

// Source 0 holds everything. Source 1 and 2 are being filled.
class SlicePickerTest : public ScheduleFixture {
 protected:
  SliceIndex take(SourceIndex source) {
    const auto slice = picker.pick(source);
    if (!slice) return kNone;
    slices.post(*slice, source);
    return *slice;
  }
  void gain(SourceIndex source, std::vector<SliceIndex> gained) {
    for (const SliceIndex slice : gained) infos[slice].candidates.set(source);
    picker.candidates_added(source, gained);
  }
  PathId add_neighbour(SourceIndex source) {
    picker.add_neighbour(source, options.order_seed);
    return connect(source);
  }

  static constexpr SliceIndex kNone = 1000;
  Reroutes reroutes{slices, sources};
  StagingGate staging{slices, options.starvation_timeout};
  SlicePicker picker{slices, sources, reroutes, staging, options};
};

TEST_F(SlicePickerTest, SlicesAreTakenInOrderFromTheFirstOne) {
  options.first_slice = 6;
  connect(0);
  EXPECT_EQ(take(0), 6u);
  EXPECT_EQ(take(0), 7u);
  EXPECT_EQ(take(0), 0u);
}

TEST_F(SlicePickerTest, ASliceThatIsOpenAgainGoesFirst) {
  connect(0);
  EXPECT_EQ(take(0), 0u);
  EXPECT_EQ(take(0), 1u);
  slices.reopen(0);
  reroutes.put_back(0);
  EXPECT_EQ(take(0), 0u);
  EXPECT_EQ(take(0), 2u);
}

TEST_F(SlicePickerTest, ASourceThatComesBackIsAskedForSlicesItDidNotHold) {
  connect(1);
  EXPECT_EQ(take(1), kNone);
  infos[5].candidates.set(1);
  EXPECT_EQ(take(1), kNone);
  picker.look_again(1);
  EXPECT_EQ(take(1), 5u);
}

TEST_F(SlicePickerTest, ANeighbourIsAskedForItsRarestSliceAndTheSourceForSlicesThatNobodyHolds) {
  connect(0);
  add_neighbour(1);
  add_neighbour(2);
  gain(1, {0, 1, 2});
  gain(2, {0, 2});
  EXPECT_EQ(take(1), 1u);
  EXPECT_EQ(take(0), 3u);
}

TEST_F(SlicePickerTest, ALostNeighboursSlicesAreAskedOfTheSourceAgain) {
  connect(0);
  const PathId neighbour = add_neighbour(1);
  gain(1, {0, 1});
  EXPECT_EQ(take(0), 2u);
  sources.abort_path(neighbour, ErrorCode::kPeerLost, "");
  EXPECT_EQ(take(0), 0u);
}

}  // namespace
}  // namespace rekindle::transport
