#include "tests/transport/schedule/schedule_fixture.h"
#include "transport/schedule/progress_watch.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

class StarvationWatchTest : public ScheduleFixture {
 protected:
  StarvationWatchTest() : ScheduleFixture(2) {}
  PathId add_path(SourceIndex source) {
    const PathId path = connect(source);
    watch.path_added(now);
    return path;
  }
  std::optional<Error> pass(Duration duration, bool waiting = false) {
    return watch.tick(waiting, now += duration);
  }

  StarvationWatch watch{slices, sources, options};
};

TEST_F(StarvationWatchTest, ItIsSaidOnceAndAgainAfterAPathThatDoesNotHelp) {
  EXPECT_FALSE(pass(10ms));
  EXPECT_EQ(watch.take(), 2u);
  EXPECT_FALSE(pass(10ms));
  EXPECT_FALSE(watch.take());
  add_path(1);
  EXPECT_EQ(watch.take(), 2u);
  add_path(0);
  EXPECT_FALSE(watch.take());
}

TEST_F(StarvationWatchTest, TheBatchFailsAfterTheTimeoutNamingTheLastCause) {
  pass(10ms);
  EXPECT_FALSE(pass(4999ms));
  const auto error = pass(1ms);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message(),
            "no living source holds 2 of 2 slices; the last cause: no source was connected");
}

TEST_F(StarvationWatchTest, ASourceThatDrainsIsAlive) {
  const PathId path = add_path(0);
  sources.abort_path(path, ErrorCode::kTimeout, "silent");
  pass(10ms);
  EXPECT_FALSE(watch.take());
  sources.path_closed(path, "");
  pass(10ms);
  EXPECT_EQ(watch.take(), 2u);
}

TEST_F(StarvationWatchTest, ASliceThatALivingNeighbourMayGetIsWaitedForUntilTheProspectTimeout) {
  for (auto& info : infos) info = {kSliceBytes, SourceMask(), SourceMask(2)};
  add_path(1);
  EXPECT_FALSE(pass(10ms, true));
  EXPECT_FALSE(watch.take());
  EXPECT_FALSE(pass(1990ms, true));
  watch.candidates_gained(now);
  EXPECT_FALSE(pass(1999ms, true));
  const auto error = pass(1ms, true);
  ASSERT_TRUE(error);
  EXPECT_NE(error->message().find("2 of 2 slices are held by nobody"), std::string::npos);
}

}  // namespace
}  // namespace rekindle::transport
