#include "tools/cli/progress_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

pull::Progress half_done() {
  pull::Progress progress;
  progress.phase = "transfer";
  progress.id = {"qwen3", 41};
  progress.bytes_done = 1ULL << 30;
  progress.bytes_total = 2ULL << 30;
  progress.bytes_per_second = 512.0 * (1 << 20);
  progress.sources = {{"a", "tcp", 1, 1, false, ""}, {"b", "tcp", 1, 1, true, "gone"}};
  return progress;
}

TEST(Progress, TheBarShowsShareRateTimeLeftAndLivingSources) {
  const std::string bar = ProgressView::bar("pull", half_done(), 120);
  EXPECT_THAT(bar, HasSubstr("pull qwen3@41  [####################....................]  50 %"));
  EXPECT_THAT(bar, HasSubstr("1.00 GiB of 2.00 GiB"));
  EXPECT_THAT(bar, HasSubstr("536.9 MB/s  ETA 0:02  from a"));
  EXPECT_THAT(bar, Not(HasSubstr("b,")));
}

TEST(Progress, TheBarFitsAnyWidth) {
  for (std::size_t width = 0; width < 200; ++width) {
    EXPECT_LE(ProgressView::bar("pull", half_done(), width).size(), width);
  }
}

TEST(Progress, UnknownTotalsShowThePhase) {
  pull::Progress progress;
  progress.phase = "resolve";
  EXPECT_EQ(ProgressView::bar("pull", progress, 80), "pull  resolve ...");
  EXPECT_EQ(ProgressView::line("pull", progress), "pull: resolve");
}

TEST(Progress, NeverMoreThanAHundredPercentAndNeverAHundredTooEarly) {
  pull::Progress progress = half_done();
  progress.bytes_done = progress.bytes_total - 1;
  EXPECT_THAT(ProgressView::line("pull", progress), HasSubstr(" 99 %"));
  progress.bytes_done = progress.bytes_total * 2;
  EXPECT_THAT(ProgressView::line("pull", progress), HasSubstr(" 100 %"));
}

TEST(Progress, LinesComeOnceASecondAtMostAndNotesOnce) {
  pull::Progress progress = half_done();
  const TimePoint start{};
  ::testing::internal::CaptureStderr();
  {
    ProgressView view("pull", ProgressView::Style::kLines);
    for (int ms = 0; ms <= 2000; ms += 10) {
      progress.note = ms >= 500 ? "source b lost" : "";
      view.update(progress, start + std::chrono::milliseconds(ms));
    }
  }
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(text, '\n'), 4);  // at 0, 1 and 2 s, and the note
  EXPECT_THAT(text, HasSubstr("pull: source b lost\n"));
}

TEST(Progress, QuietSaysNothing) {
  ::testing::internal::CaptureStderr();
  ProgressView("pull", ProgressView::Style::kQuiet).update(half_done());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace rekindle::cli
