#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <string_view>

#include "src/base/clock.h"

namespace rekindle::worker {

// What a worker waits for, in this order; a session goes through them forwards only.
enum class Phase : std::size_t {
  kDetect,    // its predecessor's last sign of life → its death was seen
  kPlan,      // attach → the version and its sources are known
  kRegister,  // → connected, memory registered
  kWire,      // → every byte is here and verified
  kInstall,   // → the worker has taken them in
  kReady,     // → every rank of the instance has
};
inline constexpr std::size_t kPhaseCount = 6;
std::string_view to_string(Phase phase);

// How long each phase took. Time in the current one counts up to `now`.
class PhaseTimes {
 public:
  void begin(Phase phase, TimePoint now) {
    phase_ = phase;
    since_ = now;
    running_ = true;
  }
  // Earlier phases are not entered again: that time stays with the current one.
  void enter(Phase phase, TimePoint now) {
    if (!running_ || phase <= phase_) return;
    add(now);
    begin(phase, now);
  }
  void end(TimePoint now) {
    if (!running_) return;
    add(now);
    running_ = false;
  }
  Phase current() const { return phase_; }
  void set(Phase phase, Duration took) { took_[static_cast<std::size_t>(phase)] = took; }
  std::array<Duration, kPhaseCount> at(TimePoint now) const {
    auto took = took_;
    if (running_ && now > since_) took[static_cast<std::size_t>(phase_)] += now - since_;
    return took;
  }

 private:
  void add(TimePoint now) {
    if (now > since_) took_[static_cast<std::size_t>(phase_)] += now - since_;
  }
  std::array<Duration, kPhaseCount> took_{};
  Phase phase_ = Phase::kPlan;
  TimePoint since_{};
  bool running_ = false;
};

}  // namespace rekindle::worker
