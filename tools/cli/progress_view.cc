#include "tools/cli/progress_view.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

#include <unistd.h>

#include "src/base/units.h"
#include "tools/cli/output.h"

namespace rekindle::cli {
namespace {

void write_error_stream(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

double fraction(const pull::Progress& progress) {
  if (progress.bytes_total == 0) return 0;
  return std::min(
      1.0, static_cast<double>(progress.bytes_done) / static_cast<double>(progress.bytes_total));
}

std::string time_left(const pull::Progress& progress) {
  if (progress.bytes_per_second < 1 || progress.bytes_done >= progress.bytes_total) return {};
  const double left =
      static_cast<double>(progress.bytes_total - progress.bytes_done) / progress.bytes_per_second;
  if (left > 359'999) return {};
  const auto seconds_left = static_cast<long>(std::ceil(left));
  if (seconds_left >= 3600) {
    return fmt::format("{}:{:02}:{:02}", seconds_left / 3600, seconds_left / 60 % 60,
                       seconds_left % 60);
  }
  return fmt::format("{}:{:02}", seconds_left / 60, seconds_left % 60);
}

std::string source_names(const pull::Progress& progress) {
  std::string names;
  std::size_t more = 0;
  constexpr std::size_t kNamed = 3;
  for (const pull::SourceLine& source : progress.sources) {
    if (source.lost) continue;
    if (std::ranges::count(names, ',') + 1 >= static_cast<std::ptrdiff_t>(kNamed) &&
        !names.empty()) {
      ++more;
      continue;
    }
    if (!names.empty()) names += ", ";
    names += printable(source.name);
  }
  if (more > 0) names += fmt::format(" +{}", more);
  return names;
}

std::string amount(const pull::Progress& progress) {
  return fmt::format("{} of {}", format_bytes(progress.bytes_done),
                     format_bytes(progress.bytes_total));
}

}  // namespace

ProgressView::Style ProgressView::style_for_stderr(bool quiet) {
  if (quiet) return Style::kQuiet;
  return terminal(STDERR_FILENO) ? Style::kBar : Style::kLines;
}

std::string ProgressView::line(std::string_view verb, const pull::Progress& progress) {
  std::string text(verb);
  if (progress.bytes_total > 0) text += " " + progress.id.to_string();
  text += ": " + progress.phase;
  if (progress.bytes_total > 0) {
    text += fmt::format(" {:.0f} %, {}", std::floor(fraction(progress) * 100), amount(progress));
  }
  if (progress.bytes_per_second > 0) {
    text += fmt::format(", {}", format_rate(progress.bytes_per_second));
  }
  if (const std::string left = time_left(progress); !left.empty()) text += ", " + left + " left";
  if (const std::string names = source_names(progress); !names.empty()) text += ", from " + names;
  return text;
}

std::string ProgressView::bar(std::string_view verb, const pull::Progress& progress,
                              std::size_t width) {
  const double done = fraction(progress);
  std::string head(verb);
  // The version may not be known yet.
  if (progress.bytes_total == 0) {
    head += fmt::format("  {} ...", progress.phase);
    return head.substr(0, width);
  }
  head += " " + progress.id.to_string();
  std::string tail = fmt::format(" {:3.0f} %  {}", std::floor(done * 100), amount(progress));
  if (progress.bytes_per_second > 0) {
    tail += fmt::format("  {}", format_rate(progress.bytes_per_second));
  }
  if (const std::string left = time_left(progress); !left.empty()) tail += "  ETA " + left;
  if (const std::string names = source_names(progress); !names.empty()) {
    const std::string from = "  from " + names;
    constexpr std::size_t kBarWithSources = 16;
    if (head.size() + tail.size() + from.size() + kBarWithSources <= width) tail += from;
  }
  constexpr std::size_t kMinimumBar = 5;
  constexpr std::size_t kMaximumBar = 40;
  const std::size_t used = head.size() + tail.size() + 4;
  if (used + kMinimumBar > width) return (head + tail).substr(0, width);
  const std::size_t cells = std::min(kMaximumBar, width - used);
  const auto full = static_cast<std::size_t>(done * static_cast<double>(cells));
  return fmt::format("{}  [{}{}]{}", head, std::string(full, '#'), std::string(cells - full, '.'),
                     tail);
}

void ProgressView::update(const pull::Progress& progress, TimePoint now) {
  if (style_ == Style::kQuiet) return;
  const bool news = !progress.note.empty() && notes_.insert(progress.note).second;
  if (news) {
    finish();
    write_error_stream(fmt::format("{}: {}\n", verb_, printable(progress.note)));
  }
  // There is nothing to show yet.
  if (style_ == Style::kLines && progress.bytes_total == 0) return;
  const bool bar_style = style_ == Style::kBar;
  const std::chrono::milliseconds pause(bar_style ? 100 : 1000);
  if (written_ && now - last_ < pause && !(bar_style && news)) return;
  last_ = now;
  written_ = true;
  if (bar_style) {
    const std::size_t width = terminal_width(STDERR_FILENO);
    // Never the last column: some terminals wrap there.
    write_error_stream("\r\x1b[K" + bar(verb_, progress, width - 1));
    bar_shown_ = true;
  } else {
    write_error_stream(line(verb_, progress) + "\n");
  }
}

void ProgressView::finish() {
  if (!bar_shown_) return;
  write_error_stream("\r\x1b[K");
  bar_shown_ = false;
}

}  // namespace rekindle::cli
