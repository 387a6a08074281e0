#pragma once

#include <algorithm>
#include <chrono>

#include "src/base/clock.h"

namespace rekindle::pull {

// How long no source has sent a byte of this pull. A pull in trouble has this one budget: it bounds
// reconnecting, asking the coordinator, dialling and waiting together. So NO_SOURCE comes at a
// known time after the last byte, however many of these steps follow one another. Pure; the caller
// brings the time.
class Silence {
 public:
  Silence(std::chrono::milliseconds patience, TimePoint now) : patience_(patience), since_(now) {}

  void heard(TimePoint when) { since_ = std::max(since_, when); }
  // This process was stopped for `pause`, which was no source's silence.
  void forgive(Duration pause) { since_ += pause; }

  bool over(TimePoint now) const { return now - since_ >= patience_; }
  std::chrono::milliseconds left(TimePoint now) const {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(since_ + patience_ - now);
    return std::max(left, std::chrono::milliseconds(0));
  }
  // How long a step may take that wants `wanted`. At least 1 ms: a deadline, not "none".
  std::chrono::milliseconds at_most(std::chrono::milliseconds wanted, TimePoint now) const {
    return std::clamp(left(now), std::chrono::milliseconds(1), wanted);
  }

 private:
  const std::chrono::milliseconds patience_;
  TimePoint since_;
};

}  // namespace rekindle::pull
