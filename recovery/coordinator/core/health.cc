#include "recovery/coordinator/core/health.h"

#include <algorithm>
#include <cmath>

namespace rekindle::coordinator {

namespace {

constexpr double kWeight = 0.25;  // of one report
constexpr double kSlowBelow = 0.25;
constexpr double kHalfLifeSeconds = 30;

}  // namespace

void SourceHealth::observe(double relative, TimePoint now) {
  if (!std::isfinite(relative)) return;
  value_ = at(now) * (1 - kWeight) + std::clamp(relative, 0.0, 1.0) * kWeight;
  seen_ = now;
}

double SourceHealth::at(TimePoint now) const {
  if (value_ >= 1) return 1;
  const double age = std::max(0.0, seconds(now - seen_));
  return 1 - (1 - value_) * std::exp2(-age / kHalfLifeSeconds);
}

bool SourceHealth::slow(TimePoint now) const { return at(now) < kSlowBelow; }

}  // namespace rekindle::coordinator
