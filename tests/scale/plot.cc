#include "tests/scale/plot.h"

#include <algorithm>

#include <fmt/format.h>

namespace rekindle::scale {

namespace {

constexpr double kWidth = 720;
constexpr double kPanel = 200;
constexpr double kLeft = 60;
constexpr double kRight = 20;
constexpr double kTop = 36;
constexpr double kBottom = 34;
constexpr int kTicks = 6;

struct Scale {
  double end_s;
  double top;  // of the panel
  double x(double at_s) const { return kLeft + at_s / end_s * (kWidth - kLeft - kRight); }
  double y(double part) const { return top + kPanel - kBottom - part * (kPanel - kTop - kBottom); }
};

std::string axes(const Report& report, const Scale& scale) {
  std::string svg = fmt::format(R"(<text x="{}" y="{}" font-weight="bold">{}</text>)"
                                "\n",
                                kLeft, scale.top + 18, report.what);
  for (int i = 0; i <= kTicks; ++i) {
    const double at = scale.end_s * i / kTicks;
    svg += fmt::format(
        R"(<line x1="{0:.1f}" y1="{1:.1f}" x2="{0:.1f}" y2="{2:.1f}" stroke="#e4e4e4"/>)"
        R"(<text x="{0:.1f}" y="{3:.1f}" text-anchor="middle">{4:.0f} s</text>)"
        "\n",
        scale.x(at), scale.y(0), scale.y(1), scale.y(0) + 16, at);
  }
  for (const double part : {0.0, 0.5, 1.0}) {
    svg += fmt::format(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="#e4e4e4"/>)"
                       R"(<text x="{:.1f}" y="{:.1f}" text-anchor="end">{:.0f}</text>)"
                       "\n",
                       scale.x(0), scale.y(part), scale.x(scale.end_s), scale.y(part), kLeft - 6,
                       scale.y(part) + 4, part * static_cast<double>(report.awaited));
  }
  return svg;
}

std::string panel(const Report& report, double top) {
  const Scale scale{std::max(report.all_ready_s, 2 * report.limit_s) * 1.05, top};
  double most = 1;
  for (const Sample& sample : report.samples) most = std::max(most, sample.goodput);
  std::string svg = axes(report, scale);
  std::string ready;
  std::string goodput;
  for (const Sample& sample : report.samples) {
    const double part = static_cast<double>(sample.ready) / static_cast<double>(report.awaited);
    ready += fmt::format("{:.1f},{:.1f} ", scale.x(sample.seconds), scale.y(part));
    goodput +=
        fmt::format("{:.1f},{:.1f} ", scale.x(sample.seconds), scale.y(sample.goodput / most));
  }
  svg += fmt::format(R"(<polyline points="{}" fill="none" stroke="#9db8d9" stroke-width="1.5"/>)"
                     "\n"
                     R"(<polyline points="{}" fill="none" stroke="#1f4e8c" stroke-width="2.5"/>)"
                     "\n",
                     goodput, ready);
  svg += fmt::format(
      R"(<line x1="{0:.1f}" y1="{1:.1f}" x2="{0:.1f}" y2="{2:.1f}" stroke="#b03a2e" )"
      R"(stroke-dasharray="5 4"/><text x="{3:.1f}" y="{4:.1f}" fill="#b03a2e">the links alone: )"
      R"({5:.1f} s</text>)"
      "\n",
      scale.x(report.limit_s), scale.y(0), scale.y(1), scale.x(report.limit_s) + 5, scale.y(1) + 12,
      report.limit_s);
  svg += fmt::format(
      R"(<text x="{:.1f}" y="{:.1f}" text-anchor="end" fill="#5b7ea8">goodput, at most {:.1f} TB/s</text>)"
      "\n",
      kWidth - kRight, scale.top + 18, most / 1e12);
  return svg;
}

}  // namespace

std::string plot(const std::vector<Report>& reports) {
  std::string svg = fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" )"
      R"(font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>)"
      "\n",
      kWidth, kPanel * static_cast<double>(reports.size()));
  double top = 0;
  for (const Report& report : reports) {
    svg += panel(report, top);
    top += kPanel;
  }
  return svg + "</svg>\n";
}

}  // namespace rekindle::scale
