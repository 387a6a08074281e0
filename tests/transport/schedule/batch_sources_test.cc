#include "transport/schedule/batch_sources.h"

#include "tests/transport/schedule/schedule_fixture.h"

namespace rekindle::transport {
namespace {

using namespace std::chrono_literals;

using BatchSourcesTest = ScheduleFixture;

TEST_F(BatchSourcesTest, ASourceIsLostWhenItsLastPathHasDrained) {
  const PathId first = connect(0);
  const PathId second = connect(0);
  sources.abort_path(first, ErrorCode::kTimeout, "silent");
  sources.path_closed(second, "reset by peer");
  EXPECT_TRUE(sources.living().empty());
  EXPECT_TRUE(sources.draining().test(0));
  EXPECT_TRUE(sources.take_lost().empty());
  sources.path_closed(first, "ignored: the abort has its own cause");
  const auto lost = sources.take_lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].cause.code(), ErrorCode::kTimeout);
  EXPECT_EQ(lost[0].cause.message(), "path: silent");
  EXPECT_EQ(sources.last_cause(), "path: silent");
}

TEST_F(BatchSourcesTest, AVerdictOnASourceIsItsCauseHoweverItsPathsEnd) {
  const PathId path = connect(0);
  sources.lose(0, {ErrorCode::kStale, "its keys are old"});
  EXPECT_EQ(sources.take_aborts(), std::vector<PathId>{path});
  sources.path_closed(path, "closed");
  const auto lost = sources.take_lost();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].cause.code(), ErrorCode::kStale);
}

TEST_F(BatchSourcesTest, EnoughStrikesQuarantineASource) {
  const PathId path = connect(0);
  sources.strike(0, "slice 1");
  EXPECT_TRUE(sources.take_aborts().empty());
  sources.strike(0, "slice 2");
  EXPECT_EQ(sources.take_aborts(), std::vector<PathId>{path});
  sources.path_closed(path, "");
  EXPECT_EQ(sources.take_lost().at(0).cause.code(), ErrorCode::kCorrupt);
}

TEST_F(BatchSourcesTest, APathThatComesAfterTheEndIsAbortedAndItsSourceIsNotLost) {
  sources.end_batch();
  const PathId path = connect(0);
  EXPECT_EQ(sources.take_aborts(), std::vector<PathId>{path});
  sources.path_closed(path, "");
  EXPECT_TRUE(sources.take_lost().empty());
}

TEST_F(BatchSourcesTest, PathsTakeTurnsAndTheWindowIsOfAllOfThem) {
  const PathId first = connect(0);
  const PathId second = connect(0);
  std::vector<PathId> posted;
  while (const auto path = sources.path_with_room(0, kSliceBytes)) {
    post(*path, static_cast<SliceIndex>(posted.size()));
    posted.push_back(*path);
  }
  EXPECT_EQ(posted, (std::vector<PathId>{first, second, first, second}));
  sources.unpost(second, 1, kSliceBytes, now);
  EXPECT_EQ(sources.path_with_room(0, kSliceBytes), second);
}

TEST_F(BatchSourcesTest, ASlowSourceStillGetsOneSliceAtATime) {
  const PathId path = connect(0);
  measure(path, 1000);
  ASSERT_TRUE(sources.path_with_room(0, kSliceBytes));
  post(path, 0);
  EXPECT_FALSE(sources.path_with_room(0, kSliceBytes));
}

TEST_F(BatchSourcesTest, ARailIsBusyWhileAnyOfItsPathsHasASliceInFlight) {
  const PathId first = connect(0, "mlx5_0:1");
  const PathId second = connect(1, "mlx5_0:1");
  const PathId other = connect(0, "mlx5_1:1");
  const auto rails = [this] {
    BatchProgress progress;
    sources.report(progress, now);
    return progress.rails;
  };
  ASSERT_EQ(rails().size(), 2u);
  EXPECT_EQ(rails()[0].home, "mlx5_0:1");
  post(first, 0);
  now += 2s;
  post(second, 1);
  now += 1s;
  EXPECT_EQ(rails()[0].busy, 3s) << "also before a slice has landed";
  sources.unpost(first, 0, kSliceBytes, now);
  sources.count_landed(first, kSliceBytes);
  now += 4s;
  sources.unpost(second, 1, kSliceBytes, now);
  sources.count_landed(second, kSliceBytes);
  now += 30s;
  EXPECT_EQ(rails()[0].busy, 7s) << "two slices at once are not twice as long";
  EXPECT_EQ(rails()[0].bytes, 2 * kSliceBytes);
  EXPECT_EQ(rails()[1].busy, 0s);
  post(other, 2);
  post(first, 3);
  now += 1s;
  EXPECT_EQ(rails()[0].busy, 8s);
  EXPECT_EQ(rails()[1].busy, 1s);
  EXPECT_EQ(rails()[1].bytes, 0u) << "bytes count when their slice has landed";
}

TEST(Goodput, NothingIsMeasuredBeforeTheFirstByte) {
  GoodputMeter meter;
  for (int i = 0; i < 100; ++i) meter.sample(10ms, true);
  EXPECT_FALSE(meter.measured());
  EXPECT_LT(meter.bytes_per_second_now(), 2) << "but it looks slow";
  meter.landed(1000);
  meter.sample(1s, true);
  EXPECT_DOUBLE_EQ(meter.bytes_per_second(), 500);
}

TEST(Goodput, IdleTimeDoesNotCount) {
  GoodputMeter meter;
  meter.landed(1000);
  meter.sample(100ms, true);
  for (int i = 0; i < 100; ++i) meter.sample(10ms, false);
  EXPECT_DOUBLE_EQ(meter.bytes_per_second_now(), 10'000);
}

TEST(Goodput, AStallShowsAtOnceAndASampleIsSmoothed) {
  GoodputMeter meter;
  meter.landed(100'000);
  meter.sample(100ms, true);
  for (int i = 0; i < 50; ++i) meter.sample(10ms, true);
  EXPECT_DOUBLE_EQ(meter.bytes_per_second(), 1e6);
  EXPECT_LT(meter.bytes_per_second_now(), 10);
  meter.landed(250'000);
  meter.sample(0ms, true);
  EXPECT_DOUBLE_EQ(meter.bytes_per_second(), 0.7 * 1e6 + 0.3 * 0.5e6);
}

}  // namespace
}  // namespace rekindle::transport
