#pragma once

#include <chrono>
#include <cstdint>

namespace rekindle {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::nanoseconds;

inline TimePoint steady_now() { return std::chrono::steady_clock::now(); }

// Pure modules take a Clock (or the time as an argument), so that tests and the simulation own
// time.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  TimePoint now() const override { return std::chrono::steady_clock::now(); }
};

class ManualClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void advance(Duration by) { now_ += by; }

 private:
  TimePoint now_{};
};

inline double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }
inline std::int64_t milliseconds(Duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
}

}  // namespace rekindle
