#include "recovery/worker/core/restart_policy.h"

#include <algorithm>

namespace rekindle::worker {

RestartPolicy::Decision RestartPolicy::failed(TimePoint started, TimePoint ended) {
  if (ended - started >= options_.healthy_after) failures_ = 0;
  ++failures_;
  Decision decision;
  decision.failures = failures_;
  if (options_.crash_loop > 0 && failures_ >= options_.crash_loop) return decision;
  decision.restart = true;
  if (failures_ == 1) return decision;
  const double longest = static_cast<double>(options_.longest_delay.count());
  double delay = static_cast<double>(options_.first_delay.count());
  for (int i = 2; i < failures_ && delay < longest; ++i) delay *= 2;
  delay = std::min(delay, longest);
  const double spread = std::clamp(options_.jitter, 0.0, 1.0) * (2 * chance_() - 1);
  delay = std::clamp(delay * (1 + spread), 0.0, longest);
  decision.delay = std::chrono::milliseconds(static_cast<std::int64_t>(delay));
  return decision;
}

}  // namespace rekindle::worker
