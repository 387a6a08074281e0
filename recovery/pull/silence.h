#pragma once

#include <algorithm>
#include <chrono>

#include "src/base/clock.h"

namespace rekindle::pull {

// For how long nobody has sent a byte of this pull. A pull in trouble has this one budget:
// reconnecting, asking the coordinator, dialling and waiting are all bounded by what is left of it,
// so that NO_SOURCE comes at a known time after the last byte, however many of them follow one
// another. While any source sends, it does not run. Control thread only; the caller brings the
// time.
class Silence {
 public:
  Silence(std::chrono::milliseconds patience, TimePoint now) : patience_(patience), since_(now) {}

  void heard(TimePoint when) { since_ = std::max(since_, when); }
  // This process was stopped for `pause`: that was nobody's silence.
  void forgive(Duration pause) { since_ += pause; }

  bool over(TimePoint now) const { return now - since_ >= patience_; }
  std::chrono::milliseconds left(TimePoint now) const {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(since_ + patience_ - now);
    return std::max(left, std::chrono::milliseconds(0));
  }
  // How long a step that would like `wanted` may take.
  std::chrono::milliseconds at_most(std::chrono::milliseconds wanted, TimePoint now) const {
    return std::clamp(left(now), std::chrono::milliseconds(1), wanted);
  }

 private:
  const std::chrono::milliseconds patience_;
  TimePoint since_;
};

}  // namespace rekindle::pull
