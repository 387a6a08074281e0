#include "tests/transport/schedule/schedule_fixture.h"
#include "transport/schedule/reroute.h"

namespace rekindle::transport {
namespace {

// Source 0 is a hundred times faster than source 1. Both hold everything.
class StragglersTest : public ScheduleFixture {
 protected:
  StragglersTest() {
    everybody_holds_everything(2);
    fast = connect(0);
    slow = connect(1);
    measure(fast, 100 * kMiB);
    measure(slow, 1 * kMiB);
  }
  void finish_all_but(SliceIndex last) {
    for (SliceIndex slice = 0; slice < slices.count(); ++slice) {
      if (slice == last) continue;
      slices.post(slice, 0);
      slices.land(slice);
      slices.accept(slice);
    }
  }

  PathId fast = 0;
  PathId slow = 0;
  Reroutes reroutes{slices, sources};
  Stragglers stragglers{slices, sources, reroutes, options};
};

TEST_F(StragglersTest, NearTheEndASlowSourceGetsNoSliceThatTheFastOneFinishesSooner) {
  EXPECT_TRUE(stragglers.others_finish_sooner(1, 3, infos[3]));
  EXPECT_FALSE(stragglers.others_finish_sooner(0, 3, infos[3]));
  infos[3].candidates = SourceMask(2);
  EXPECT_FALSE(stragglers.others_finish_sooner(1, 3, infos[3])) << "nobody else holds it";
}

TEST_F(StragglersTest, AnIdleFastSourceStealsTheLastSlice) {
  finish_all_but(7);
  post(slow, 7);
  EXPECT_TRUE(stragglers.can_steal(0));
  EXPECT_FALSE(stragglers.can_steal(1)) << "it has something in flight";
  EXPECT_EQ(stragglers.find_victim(0), slow);
}

TEST_F(StragglersTest, NothingIsStolenThatTheThiefDoesNotHold) {
  finish_all_but(7);
  post(slow, 7);
  infos[7].candidates = SourceMask(2);
  EXPECT_FALSE(stragglers.find_victim(0));
}

TEST_F(StragglersTest, TheLastPathOfASourceStaysWhileASliceIsOpen) {
  post(slow, 7);
  EXPECT_FALSE(stragglers.find_victim(0));
  const PathId second = connect(1);
  post(second, 6);
  EXPECT_EQ(stragglers.find_victim(0), slow);
}

}  // namespace
}  // namespace rekindle::transport
