#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "src/base/clock.h"

namespace rekindle::worker {

struct RestartOptions {
  // After the second failure in a row. Each further failure doubles it.
  std::chrono::milliseconds first_delay{100};
  std::chrono::milliseconds longest_delay{30'000};
  double jitter = 0.2;  // a fraction of the delay, in both directions
  // After a run of this length, earlier failures do not count.
  std::chrono::milliseconds healthy_after{60'000};
  // After this many failures in a row the worker is not started again. 0: no limit.
  int crash_loop = 5;
};

// Decides whether and when a supervised worker is started again after a failure. Pure: the caller
// passes times and chance. After a healthy run the worker restarts at once, because a crash should
// cost no more than the worker's own start.
class RestartPolicy {
 public:
  // `chance` returns a number in [0, 1).
  RestartPolicy(RestartOptions options, std::function<double()> chance)
      : options_(options), chance_(std::move(chance)) {}

  struct Decision {
    bool restart = false;
    std::chrono::milliseconds delay{0};
    int failures = 0;  // in a row
  };
  Decision failed(TimePoint started, TimePoint ended) {
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

 private:
  const RestartOptions options_;
  const std::function<double()> chance_;
  int failures_ = 0;
};

}  // namespace rekindle::worker
