#pragma once

#include <cstdint>
#include <mutex>

#include "src/base/clock.h"

namespace rekindle::transport {

// A token bucket over bytes, shared by the streams of one session. Thread-safe; time is handed in.
class RateLimiter {
 public:
  explicit RateLimiter(std::uint64_t bytes_per_second) { set_rate(bytes_per_second); }

  void set_rate(std::uint64_t bytes_per_second);  // 0 = no cap
  std::uint64_t rate() const;

  // How many of `wanted` bytes may go now: 0, or at least min(wanted, a useful minimum).
  std::uint64_t take(std::uint64_t wanted, TimePoint now);
  // What was taken and not sent.
  void give_back(std::uint64_t bytes);
  // When take() of one useful minimum will succeed.
  TimePoint ready_at(TimePoint now) const;

 private:
  void refill(TimePoint now);

  mutable std::mutex mutex_;
  std::uint64_t rate_ = 0;     // guarded by mutex_, as are the rest
  std::uint64_t burst_ = 0;    // bucket size: 10 ms of the rate, at least kMinimum
  std::uint64_t minimum_ = 0;  // smallest grant: waking up for less costs more than it moves
  double tokens_ = 0;
  TimePoint last_{};
};

}  // namespace rekindle::transport
