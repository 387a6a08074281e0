#pragma once

#include <chrono>
#include <functional>
#include <utility>

#include "src/base/clock.h"

namespace rekindle::worker {

struct RestartOptions {
  std::chrono::milliseconds first_delay{100};  // after the second failure in a row; then doubling
  std::chrono::milliseconds longest_delay{30'000};
  double jitter = 0.2;                              // of the delay, either way
  std::chrono::milliseconds healthy_after{60'000};  // a run this long forgets what was before
  int crash_loop = 5;  // so many failures in a row, each sooner than that, end it; 0: never
};

// When a supervised worker that failed is started again, or no more. Pure: times and chance are
// given. The first failure after a healthy run restarts at once: a crash should cost no more than
// the worker's own start.
class RestartPolicy {
 public:
  // `chance` yields [0, 1).
  RestartPolicy(RestartOptions options, std::function<double()> chance)
      : options_(options), chance_(std::move(chance)) {}

  struct Decision {
    bool restart = false;
    std::chrono::milliseconds delay{0};
    int failures = 0;  // in a row
  };
  Decision failed(TimePoint started, TimePoint ended);

 private:
  const RestartOptions options_;
  const std::function<double()> chance_;
  int failures_ = 0;
};

}  // namespace rekindle::worker
