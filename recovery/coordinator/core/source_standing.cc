#include "recovery/coordinator/core/source_standing.h"

#include <algorithm>
#include <cmath>

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxReports = 64;
constexpr std::size_t kMaxParties = 64;
constexpr std::size_t kMaxPullersOfParty = 64;
constexpr std::size_t kPartiesForQuarantine = 2;
constexpr std::uint32_t kMaxQuarantineDoublings = 16;
constexpr double kWeightOfOneReport = 0.25;
constexpr double kSlowBelow = 0.25;
constexpr double kForgottenAbove = 0.999;
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

double SourceHealth::View::at(TimePoint now) const {
  if (value >= 1) return 1;
  const double age = std::max(0.0, seconds(now - seen));
  return 1 - (1 - value) * std::exp2(-age / kHalfLifeSeconds);
}

void SourceHealth::observe(const std::string& party, double relative, TimePoint now) {
  if (!std::isfinite(relative)) return;
  std::erase_if(views_, [&](const auto& entry) { return entry.second.at(now) > kForgottenAbove; });
  const double reported = std::clamp(relative, 0.0, 1.0);
  const auto found = views_.find(party);
  if (found == views_.end() && (reported > kForgottenAbove || views_.size() >= kMaxParties)) {
    return;
  }
  View& view = views_[party];
  view = {view.at(now) * (1 - kWeightOfOneReport) + reported * kWeightOfOneReport, now};
}

double SourceHealth::at(TimePoint now, const std::string& party) const {
  double own = 1;
  double lowest = 1;
  double second = 1;
  for (const auto& [other, view] : views_) {
    const double value = view.at(now);
    if (other == party) own = value;
    second = std::min(second, std::max(lowest, value));
    lowest = std::min(lowest, value);
  }
  return std::min(own, second);
}

bool SourceHealth::slow(TimePoint now, const std::string& party) const {
  return at(now, party) < kSlowBelow;
}

Duration SourceStanding::backoff(std::uint32_t strikes, const Timing& timing) {
  return std::min<Duration>(
      timing.quarantine_first * (1L << std::min(strikes, kMaxQuarantineDoublings)),
      timing.quarantine_max);
}

void SourceStanding::gave_nothing(const std::string& party, const Timing& timing, TimePoint now) {
  std::erase_if(silences_, [&](const auto& entry) {
    return now - entry.second.until > timing.quarantine_max;
  });
  const auto found = silences_.find(party);
  if (found == silences_.end() && silences_.size() >= kMaxParties) return;
  Silence& silence = silences_[party];
  // Pulls that run beside each other notice the same.
  if (silence.until > now) return;
  silence.until = now + backoff(silence.times++, timing);
}

bool SourceStanding::gives_nothing(const std::string& party, TimePoint now) const {
  const auto found = silences_.find(party);
  return found != silences_.end() && found->second.until > now;
}

bool SourceStanding::struck_by(const Incarnation& puller, TimePoint now) const {
  return std::ranges::any_of(accusations_, [&](const auto& entry) {
    return (entry.second.until > now || quarantined(now)) && entry.second.pullers.contains(puller);
  });
}

TimePoint SourceStanding::kept_from_until(const Incarnation& puller) const {
  TimePoint until = quarantined_until_;
  for (const auto& [party, accusation] : accusations_) {
    if (accusation.pullers.contains(puller)) until = std::max(until, accusation.until);
  }
  return until;
}

void SourceStanding::strike(const Incarnation& puller, const std::string& party,
                            const Timing& timing, TimePoint now) {
  std::erase_if(accusations_, [&](const auto& entry) {
    return now - entry.second.at > 2 * timing.quarantine_max;
  });
  const auto found = accusations_.find(party);
  if (found == accusations_.end() && accusations_.size() >= kMaxParties) return;
  Accusation& accusation = accusations_[party];
  const bool repeats = accusation.until > now;
  if (!repeats && !quarantined(now)) accusation.pullers.clear();
  if (accusation.pullers.size() < kMaxPullersOfParty) accusation.pullers.insert(puller);
  accusation.at = now;
  // However many pullers a party has, only its first one makes the times longer.
  const auto length = [&](std::uint32_t& strikes) {
    return repeats ? timing.quarantine_first : backoff(strikes++, timing);
  };
  accusation.until = std::max(accusation.until, now + length(accusation.strikes));
  const auto recent = std::ranges::count_if(accusations_, [&](const auto& entry) {
    return now - entry.second.at <= timing.quarantine_max;
  });
  if (static_cast<std::size_t>(recent) < kPartiesForQuarantine) return;
  quarantined_until_ = std::max(quarantined_until_, now + length(quarantines_));
}

}  // namespace rekindle::coordinator
