#pragma once

#include <cstring>
#include <functional>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/core.h"
#include "tests/scale/meter.h"
#include "tests/support/durable_core.h"

namespace rekindle::scale {

using namespace std::chrono_literals;

// Virtual time: what is due happens in order.
class Events {
 public:
  TimePoint now() const { return now_; }
  void after(Duration delay, std::function<void()> run) {
    queue_.push({now_ + delay, order_++, std::move(run)});
  }
  void run_until(TimePoint end) {
    while (!queue_.empty() && queue_.top().at <= end) {
      const Event event = queue_.top();
      queue_.pop();
      now_ = event.at;
      event.run();
    }
    now_ = end;
  }

 private:
  struct Event {
    TimePoint at;
    std::uint64_t order;
    std::function<void()> run;
    bool operator>(const Event& other) const {
      return std::pair(at, order) > std::pair(other.at, other.order);
    }
  };
  TimePoint now_{1h};
  std::uint64_t order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
};

// The coordinator's real core, some network away. Its calls are metered.
class Control {
 public:
  static constexpr Duration kOneWay = 500us;

  Control(Events& events, const coordinator::Limits& limits) : events_(events) {
    const Meter::Scope scope(meter_, Duration::zero());
    core_.emplace(
        coordinator::Timing{}, limits, coordinator::DurableState{},
        [](const coordinator::StateChange&) { return Result<void>{}; },
        [this] {
          PullId id;
          ++pulls_;
          std::memcpy(id.bytes.data(), &pulls_, sizeof pulls_);
          return id;
        });
    began_ = events_.now();
    (void)core_->start(began_);
    tick();
  }
  ~Control() {
    const Meter::Scope scope(meter_, Duration::zero());
    core_.reset();
  }
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // There and back. `done` may be gone by then: it looks for itself.
  template <typename T>
  void call(std::function<T(testing::DurableCore&, TimePoint)> serve, std::function<void(T)> done) {
    events_.after(kOneWay, [this, serve = std::move(serve), done = std::move(done)] {
      std::optional<T> answer;
      {
        const Meter::Scope scope(meter_, events_.now() - began_);
        answer.emplace(serve(*core_, events_.now()));
      }
      events_.after(kOneWay,
                    [done, answer = std::move(*answer)]() mutable { done(std::move(answer)); });
    });
  }

  const coordinator::Core& core() const { return *core_; }
  const Meter& meter() const { return meter_; }

 private:
  void tick() {
    {
      const Meter::Scope scope(meter_, events_.now() - began_);
      core_->tick(events_.now());
    }
    events_.after(100ms, [this] { tick(); });
  }

  Events& events_;
  Meter meter_;
  std::optional<testing::DurableCore> core_;
  TimePoint began_{};
  std::uint64_t pulls_ = 0;
};

}  // namespace rekindle::scale
