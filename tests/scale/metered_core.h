#pragma once

#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "recovery/coordinator/core/core.h"
#include "tests/scale/meter.h"
#include "tests/support/durable_core.h"
#include "tests/support/virtual_time.h"

namespace rekindle::scale {

using namespace std::chrono_literals;

using Events = rekindle::testing::VirtualTime;

// The coordinator's real core, with the delay of a network. Its calls are metered.
class MeteredCore {
 public:
  static constexpr Duration kOneWay = 500us;

  MeteredCore(Events& events, const coordinator::Limits& limits) : events_(events) {
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
  ~MeteredCore() {
    const Meter::Scope scope(meter_, Duration::zero());
    core_.reset();
  }
  MeteredCore(const MeteredCore&) = delete;
  MeteredCore& operator=(const MeteredCore&) = delete;

  // There and back. `done` checks by itself whether its caller still lives.
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
