#include "transport/rate_limiter.h"

#include <algorithm>
#include <cmath>

namespace rekindle::transport {
namespace {
constexpr std::uint64_t kSmallestBurst = 16 << 10;
}

void RateLimiter::set_rate(std::uint64_t bytes_per_second) {
  const std::lock_guard lock(mutex_);
  if (rate_ == bytes_per_second) return;
  rate_ = bytes_per_second;
  burst_ = std::max<std::uint64_t>(rate_ / 100, kSmallestBurst);
  minimum_ = burst_ / 4;
  tokens_ = std::min(tokens_, static_cast<double>(burst_));
}

std::uint64_t RateLimiter::rate() const {
  const std::lock_guard lock(mutex_);
  return rate_;
}

void RateLimiter::refill(TimePoint now) {
  if (now <= last_) return;
  if (last_ != TimePoint{}) {
    tokens_ += seconds(now - last_) * static_cast<double>(rate_);
    tokens_ = std::min(tokens_, static_cast<double>(burst_));
  } else {
    tokens_ = static_cast<double>(burst_);
  }
  last_ = now;
}

std::uint64_t RateLimiter::take(std::uint64_t wanted, TimePoint now) {
  const std::lock_guard lock(mutex_);
  if (rate_ == 0) return wanted;
  refill(now);
  const auto available = static_cast<std::uint64_t>(std::max(tokens_, 0.0));
  if (available < std::min(wanted, minimum_)) return 0;
  const std::uint64_t granted = std::min(wanted, available);
  tokens_ -= static_cast<double>(granted);
  return granted;
}

void RateLimiter::give_back(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (rate_ == 0) return;
  tokens_ = std::min(tokens_ + static_cast<double>(bytes), static_cast<double>(burst_));
}

TimePoint RateLimiter::ready_at(TimePoint now) const {
  const std::lock_guard lock(mutex_);
  if (rate_ == 0) return now;
  const double missing = static_cast<double>(minimum_) - tokens_;
  if (missing <= 0) return now;
  const double wait = missing / static_cast<double>(rate_);
  return now + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(wait)) +
         std::chrono::microseconds(50);
}

}  // namespace rekindle::transport
