#include "recovery/coordinator/core/flapping.h"

#include <algorithm>

namespace rekindle::coordinator {

namespace {
constexpr std::uint32_t kMaxShift = 16;
}

void Flapping::died(const Timing& timing, TimePoint now) {
  const Duration since_last = now - last_death;
  if (deaths > 0 && since_last <= timing.flap_window) {
    const Duration backoff = timing.quarantine_first * (1L << std::min(strikes, kMaxShift));
    owed = std::min(backoff, timing.quarantine_max);
    ++strikes;
  } else if (deaths > 0 && since_last > timing.quarantine_max) {
    strikes = 0;
  }
  ++deaths;
  last_death = now;
}

void Flapping::returned(TimePoint now) {
  left_out_until = std::max(left_out_until, now + owed);
  owed = Duration::zero();
}

}  // namespace rekindle::coordinator
