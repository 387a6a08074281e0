#pragma once

#include <map>
#include <optional>
#include <vector>

#include "recovery/coordinator/core/fleet_state.h"
#include "recovery/coordinator/core/pull_table.h"

namespace rekindle::coordinator {

// Retires versions and tells their holders. A holder first admits no new readers; once nobody reads
// there any more, or the readers' deadline is over, it is told to let go of its copy.
class Retirement {
 public:
  Retirement(FleetState& fleet, const PullTable& pulls) : fleet_(fleet), pulls_(pulls) {}

  void start(TimePoint now) { retired_before_ = now + fleet_.timing.retire_deadline; }
  // Returns the number of nodes that hold the version. `deadline`: of its readers; nullopt leaves
  // the earlier one, at first Timing::retire_deadline.
  Durably<std::uint32_t> retire(const ModelVersion& id, TimePoint now,
                                std::optional<Duration> deadline);
  struct Orders {
    // Admit no new reader, and report the readers that are left.
    std::vector<ModelVersion> retiring;
    // Let go of the copy.
    std::vector<ModelVersion> retire;
  };
  Orders orders_for(const Member& member, TimePoint now) const;
  // The pulls and sessions that still read the version at this holder.
  std::size_t readers_at(const Member& member, const ModelVersion& id) const;
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);

 private:
  bool is_overdue(const ModelVersion& id, TimePoint now) const;

  FleetState& fleet_;
  const PullTable& pulls_;
  // The deadlines of readers. A version that was retired before this start has no entry;
  // `retired_before_` is its deadline.
  std::map<ModelVersion, TimePoint> deadlines_;
  TimePoint retired_before_{};
};

}  // namespace rekindle::coordinator
