#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
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

// Permits for nodes that drop their copies of a version to make room. A node gets one while another
// node has a whole copy to rely on: it is alive, neither drained nor quarantined, and has no such
// permit itself. So of two holders that ask together one is refused. Of a joint publication, such
// nodes must have the parts that the node has; all parts, if it has anything else of the version. A
// permit lasts a minute; it ends earlier when the node registers or announces without the version.
class EvictionPermits {
 public:
  explicit EvictionPermits(const FleetState& fleet) : fleet_(fleet) {}

  // kDenied names the other holders and says why they do not count.
  Result<void> grant(const Member& member, const ModelVersion& id, TimePoint now);
  void registered(const Incarnation& node);
  void announced(const Member& member, TimePoint now);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);

 private:
  bool has_permit(const Member& member, const ModelVersion& id, TimePoint now) const;
  // What the node has of the version that others must have before it may go.
  static std::set<Digest> parts_to_keep(const Member& member, const ModelVersion& id,
                                        const DurableVersion& version);
  // "" when another node may rely on this holder.
  std::string why_not_reliable(const Member& holder, const ModelVersion& id, TimePoint now) const;

  const FleetState& fleet_;
  std::map<std::pair<Incarnation, ModelVersion>, TimePoint> valid_until_;
};

}  // namespace rekindle::coordinator
