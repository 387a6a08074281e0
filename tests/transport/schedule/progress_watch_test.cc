#include "transport/schedule/progress_watch.h"

#include "tests/transport/schedule/schedule_fixture.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

class ProgressWatchTest : public ScheduleFixture {
 protected:
  PathId add_path(SourceIndex source, const std::string& home = {}) {
    const PathId path = connect(source, home);
    watch.path_added(source, now);
    return path;
  }
  void start(PathId path, SliceIndex slice) {
    watch.slice_will_be_posted(path, now);
    post(path, slice);
  }
  std::vector<PathId> overdue_after(Duration duration) {
    std::vector<PathId> paths;
    for (const auto& overdue : watch.overdue(now += duration)) paths.push_back(overdue.path);
    return paths;
  }

  ProgressWatch watch{sources, options};
};

TEST_F(ProgressWatchTest, APathIsOverdueWithoutAByteForTheWholeTimeout) {
  const PathId path = add_path(0);
  start(path, 0);
  EXPECT_TRUE(overdue_after(999ms).empty());
  watch.byte_landed(path, now);
  EXPECT_TRUE(overdue_after(999ms).empty());
  EXPECT_EQ(overdue_after(1ms), std::vector<PathId>{path});
  EXPECT_EQ(watch.last_byte(), now - 1000ms);
}

TEST_F(ProgressWatchTest, AnIdlePathHasTheIdleTimeout) {
  add_path(0);
  EXPECT_TRUE(overdue_after(59s).empty());
  const auto overdue = watch.overdue(now += 1s);
  ASSERT_EQ(overdue.size(), 1u);
  EXPECT_EQ(overdue[0].code, ErrorCode::kUnavailable);
}

TEST_F(ProgressWatchTest, StreamsOfASilentSourceGoTogetherAndNicsOneAtATime) {
  const PathId stream = add_path(0);
  const PathId idle_stream = add_path(0);
  const PathId nic = add_path(1, "mlx5_0");
  add_path(1, "mlx5_1");
  start(stream, 0);
  start(nic, 1);
  EXPECT_EQ(overdue_after(1s), (std::vector<PathId>{stream, idle_stream, nic}));
}

TEST_F(ProgressWatchTest, TheNextPathOfASuspectSourceHasHalfOfTheTime) {
  const PathId first = add_path(0, "mlx5_0");
  const PathId second = add_path(0, "mlx5_1");
  start(first, 0);
  ASSERT_EQ(overdue_after(1s), std::vector<PathId>{first});
  sources.abort_path(first, ErrorCode::kTimeout, "");
  sources.unpost(first, 0, kSliceBytes, now);
  now += 5s;
  start(second, 0);
  EXPECT_TRUE(overdue_after(499ms).empty());
  EXPECT_EQ(overdue_after(1ms), std::vector<PathId>{second});
}

TEST_F(ProgressWatchTest, APauseOfThisProcessMovesAllDeadlines) {
  const PathId path = add_path(0);
  start(path, 0);
  now += 30s;
  watch.forgive(30s);
  EXPECT_TRUE(overdue_after(999ms).empty());
  EXPECT_FALSE(watch.is_sending(0, now));
  EXPECT_EQ(overdue_after(1ms), std::vector<PathId>{path});
}

}  // namespace
}  // namespace rekindle::transport
