#pragma once

#include <algorithm>
#include <cstdint>

#include "src/base/clock.h"

namespace rekindle::transport {

// How fast one source sends while it has work: bytes per second, smoothed over samples of 50 ms.
class GoodputMeter {
 public:
  // A source that has sent nothing for this long is as slow as it looks now.
  static constexpr Duration kStallGrace = std::chrono::milliseconds(100);

  void landed(std::uint64_t bytes) { landed_ += bytes; }

  // `has_work`: something was in flight during `elapsed`. A sample needs bytes: a source that has
  // not begun to send is unknown, not infinitely slow.
  void sample(Duration elapsed, bool has_work) {
    if (has_work || landed_ > 0) busy_ += elapsed;
    if (busy_ < kSampleInterval || landed_ == 0) return;
    const double latest = static_cast<double>(landed_) / seconds(busy_);
    smoothed_ = measured() ? smoothed_ + kSmoothing * (latest - smoothed_) : latest;
    landed_ = 0;
    busy_ = {};
  }

  bool measured() const { return smoothed_ > 0; }
  double bytes_per_second() const { return smoothed_; }
  // The smoothed value, or less while the source stalls.
  double bytes_per_second_now() const {
    if (busy_ < kStallGrace) return smoothed_;
    const double latest = static_cast<double>(std::max<std::uint64_t>(landed_, 1)) / seconds(busy_);
    return measured() ? std::min(latest, smoothed_) : latest;
  }
  std::uint64_t bytes_since_sample() const { return landed_; }

 private:
  static constexpr Duration kSampleInterval = std::chrono::milliseconds(50);
  static constexpr double kSmoothing = 0.3;

  std::uint64_t landed_ = 0;  // since the last sample
  Duration busy_{0};          // since the last sample
  double smoothed_ = 0;       // 0: not measured yet
};

}  // namespace rekindle::transport
