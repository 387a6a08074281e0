#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "src/base/clock.h"
#include "transport/engine.h"

namespace rekindle::transport {

// How many landed bytes may wait for their verdict before no more slices are posted: memory that is
// filled faster than it is verified only makes the queue longer.
//
// While verification keeps up, rate x latency bytes wait for it (Little's law). So twice that much
// may, with the highest rate of landing bytes and the shortest latency of a verdict so far, as BBR
// sizes its window by the highest delivery rate and the shortest round trip (Cardwell et al.,
// 2016). The shortest latency is that of an empty queue, so a queue that grows does not open the
// gate further.
class VerdictGate {
 public:
  // The gate never allows less than `least_bytes`.
  explicit VerdictGate(std::uint64_t least_bytes) : least_bytes_(least_bytes) {}

  // A slice of `bytes` has landed; `all_bytes` have, in both.
  void landed(SliceIndex slice, std::uint64_t bytes, std::uint64_t all_bytes, TimePoint now) {
    // Slices that are much smaller than others verify too soon to tell anything.
    if (sample_ || bytes < largest_bytes_ / 2) return;
    if (bytes > 2 * largest_bytes_) shortest_ = Duration::max();
    largest_bytes_ = std::max(largest_bytes_, bytes);
    sample_ = Sample{slice, now, all_bytes};
  }
  void resolved(SliceIndex slice, std::uint64_t all_bytes, TimePoint now) {
    if (!sample_ || sample_->slice != slice) return;
    const Sample sample = *sample_;
    sample_.reset();
    const Duration latency = now - sample.landed_at;
    if (latency <= Duration::zero()) return;
    shortest_ = std::min(shortest_, latency);
    // Slices that were rejected do not count, so it may be less than before.
    const auto bytes = static_cast<double>(all_bytes - std::min(all_bytes, sample.all_bytes));
    highest_rate_ = std::max(highest_rate_, bytes / seconds(latency));
    const double waiting = highest_rate_ * seconds(shortest_);
    limit_bytes_ = static_cast<std::uint64_t>(2 * waiting);
  }

  std::uint64_t limit_bytes() const { return std::max(least_bytes_, limit_bytes_); }

 private:
  // One landed slice at a time is followed to its verdict.
  struct Sample {
    SliceIndex slice = 0;
    TimePoint landed_at;
    std::uint64_t all_bytes = 0;
  };

  const std::uint64_t least_bytes_;
  std::optional<Sample> sample_;
  std::uint64_t largest_bytes_ = 0;
  Duration shortest_ = Duration::max();
  double highest_rate_ = 0;  // bytes per second
  std::uint64_t limit_bytes_ = 0;
};

}  // namespace rekindle::transport
