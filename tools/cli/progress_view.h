#pragma once

#include <set>
#include <string>

#include "recovery/pull/pull_types.h"
#include "src/base/clock.h"

namespace rekindle::cli {

// Shows the progress of a publish or pull on stderr: a bar with rate, time left and sources on a
// terminal; at most one line a second elsewhere; nothing when quiet.
class ProgressView {
 public:
  enum class Style { kBar, kLines, kQuiet };

  // The style that fits stderr.
  static Style style_for_stderr(bool quiet);
  // `verb`: "pull", "publish".
  ProgressView(std::string verb, Style style) : verb_(std::move(verb)), style_(style) {}
  ~ProgressView() { finish(); }
  ProgressView(const ProgressView&) = delete;
  ProgressView& operator=(const ProgressView&) = delete;

  void update(const pull::Progress& progress) { update(progress, SteadyClock().now()); }
  void update(const pull::Progress& progress, TimePoint now);
  // Removes the bar.
  void finish();

  // One line that fits into `width` columns.
  static std::string bar(std::string_view verb, const pull::Progress& progress, std::size_t width);
  static std::string line(std::string_view verb, const pull::Progress& progress);

 private:
  std::string verb_;
  Style style_;
  bool bar_shown_ = false;
  bool written_ = false;
  TimePoint last_{};
  // Notes that were shown already.
  std::set<std::string> notes_;
};

}  // namespace rekindle::cli
