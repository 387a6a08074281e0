#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "src/base/clock.h"

namespace rekindle::testing {

// Virtual time, for simulations: events happen in the order of their times, those of the same time
// in the order in which they were added.
class VirtualTime {
 public:
  TimePoint now() const { return now_; }
  void after(Duration delay, std::function<void()> run) {
    queue_.push({now_ + delay, order_++, std::move(run)});
  }
  // Runs the next event; false: none is left before `end`, and it is `end` now.
  bool step(TimePoint end) {
    if (queue_.empty() || queue_.top().at > end) {
      now_ = end;
      return false;
    }
    const Event event = queue_.top();
    queue_.pop();
    now_ = event.at;
    ++steps_;
    event.run();
    return true;
  }
  void run_until(TimePoint end) {
    while (step(end)) {
    }
  }
  // The number of events that have run.
  std::uint64_t steps() const { return steps_; }

 private:
  struct Event {
    TimePoint at;
    std::uint64_t order;
    std::function<void()> run;
    bool operator>(const Event& other) const {
      return std::pair(at, order) > std::pair(other.at, other.order);
    }
  };
  // Above zero, so that a default TimePoint is long past.
  TimePoint now_{std::chrono::hours(1)};
  std::uint64_t order_ = 0;
  std::uint64_t steps_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
};

}  // namespace rekindle::testing
