#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "recovery/coordinator/core/catalog.h"
#include "recovery/coordinator/core/durable_table.h"
#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"
#include "recovery/coordinator/core/version_signers.h"

namespace rekindle::coordinator {

// The coordinator's own pauses, and the grace after a start or a long pause. In the grace nobody is
// taken for dead, and nothing counts as lost: agents have yet to report.
class GracePeriod {
 public:
  explicit GracePeriod(Duration length) : length_(length) {}

  void start(TimePoint now) {
    started_ = last_ = now;
    until_ = now + length_;
  }
  // Time has passed, usually less than `kLongestStep`. Returns the time for which this process
  // slept; negative when the clock went back.
  Duration advance(TimePoint now) {
    if (now < last_) return Duration(-1);
    const Duration gap = now - std::exchange(last_, now);
    if (gap > length_) until_ = std::max(until_, now + length_);
    return std::max(gap - kLongestStep, Duration::zero());
  }
  bool active(TimePoint now) const { return now < until_; }
  TimePoint until() const { return until_; }
  TimePoint started() const { return started_; }
  // At least 1, for error texts.
  std::int64_t left_ms(TimePoint now) const {
    return std::max<std::int64_t>(milliseconds(until_ - now), 1);
  }

 private:
  // A longer gap between two looks at the clock was a pause of this process.
  static constexpr Duration kLongestStep = std::chrono::milliseconds(500);

  const Duration length_;
  TimePoint started_{};
  TimePoint last_{};
  TimePoint until_{};
};

// The state that every unit of the core reads: the members and their copies, the versions, and the
// durable values. Units keep a reference to it and own the rest of their state.
struct FleetState {
  FleetState(const Timing& its_timing, const Limits& its_limits, DurableState durable)
      : timing(its_timing), limits(its_limits), table(std::move(durable)) {}
  FleetState(const FleetState&) = delete;
  FleetState& operator=(const FleetState&) = delete;

  // A drained node gets no new plans and no copies; pulls that read there finish. It stays drained
  // over its own restarts and those of the coordinator.
  bool drained(const std::string& node_id) const { return table.state().drained.contains(node_id); }
  std::uint64_t epoch() const { return table.state().epoch; }

  const Timing timing;
  Limits limits;
  DurableTable table;
  Catalog catalog{table};
  VersionSigners signers;
  Membership members{timing, limits.max_members};
  GracePeriod grace{timing.dead_after};
};

}  // namespace rekindle::coordinator
