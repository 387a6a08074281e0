#include "recovery/coordinator/core/source_standing.h"

#include <algorithm>
#include <cmath>

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxReports = 64;
constexpr std::size_t kMaxStruckBy = 64;
constexpr std::uint32_t kMaxQuarantineDoublings = 16;
constexpr double kWeightOfOneReport = 0.25;
constexpr double kSlowBelow = 0.25;
constexpr double kHalfLifeSeconds = 30;

}  // namespace

std::size_t SourceReports::find(const SourceReport& report) const {
  const auto found = std::ranges::find_if(reports_, [&](const SourceReport& earlier) {
    return earlier.incarnation == report.incarnation && earlier.node_id == report.node_id;
  });
  return static_cast<std::size_t>(found - reports_.begin());
}

SourceReports::News SourceReports::news_in(const SourceReport& report) const {
  const std::size_t index = find(report);
  const SourceReport before = index < reports_.size() ? reports_[index] : SourceReport();
  return {.failed = report.failures > before.failures,
          .delivered = report.bytes > before.bytes,
          .lost = report.lost && !before.lost,
          .quarantined = report.quarantine && !before.quarantine};
}

void SourceReports::keep(const SourceReport& report) {
  const std::size_t index = find(report);
  if (index == reports_.size()) {
    if (index < kMaxReports) reports_.push_back(report);
    return;
  }
  const bool quarantine = reports_[index].quarantine || report.quarantine;
  reports_[index] = report;
  reports_[index].quarantine = quarantine;
}

void SourceHealth::observe(double relative, TimePoint now) {
  if (!std::isfinite(relative)) return;
  value_ = at(now) * (1 - kWeightOfOneReport) + std::clamp(relative, 0.0, 1.0) * kWeightOfOneReport;
  seen_ = now;
}

double SourceHealth::at(TimePoint now) const {
  if (value_ >= 1) return 1;
  const double age = std::max(0.0, seconds(now - seen_));
  return 1 - (1 - value_) * std::exp2(-age / kHalfLifeSeconds);
}

bool SourceHealth::slow(TimePoint now) const { return at(now) < kSlowBelow; }

void SourceStanding::strike(const Incarnation& puller, const Timing& timing, TimePoint now) {
  if (!quarantined(now)) struck_by_.clear();
  if (struck_by_.size() < kMaxStruckBy) struck_by_.insert(puller);
  const Duration backoff =
      timing.quarantine_first * (1L << std::min(strikes_, kMaxQuarantineDoublings));
  ++strikes_;
  quarantined_until_ = std::max(quarantined_until_, now + std::min(backoff, timing.quarantine_max));
}

}  // namespace rekindle::coordinator
