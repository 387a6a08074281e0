#pragma once

#include <cstdint>
#include <mutex>

#include "src/base/clock.h"

namespace rekindle::transport {

// A token bucket over bytes that the streams of one session share. The caller passes the time.
// Thread-safe.
class RateLimiter {
 public:
  explicit RateLimiter(std::uint64_t bytes_per_second) { set_rate(bytes_per_second); }

  void set_rate(std::uint64_t bytes_per_second);  // 0 = no cap
  std::uint64_t rate() const;

  // Takes up to `wanted` bytes and returns how many: 0, or at least min(wanted, a useful minimum).
  std::uint64_t take(std::uint64_t wanted, TimePoint now);
  // Returns bytes that were taken and not sent.
  void give_back(std::uint64_t bytes);
  // When take() will return a useful minimum.
  TimePoint ready_at(TimePoint now) const;

 private:
  void refill(TimePoint now);

  mutable std::mutex mutex_;
  // Guarded by mutex_, as are the others.
  std::uint64_t rate_ = 0;
  // The size of the bucket: 10 ms of the rate, at least kSmallestBurst.
  std::uint64_t burst_ = 0;
  // The smallest grant. To wake up for less costs more than it moves.
  std::uint64_t minimum_ = 0;
  double tokens_ = 0;
  TimePoint last_{};
};

}  // namespace rekindle::transport
