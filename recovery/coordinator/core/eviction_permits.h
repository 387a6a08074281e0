#pragma once

#include <map>
#include <string>
#include <utility>

#include "recovery/coordinator/core/fleet_state.h"

namespace rekindle::coordinator {

// Permits for nodes that drop a copy to make room. A node gets one while another node has a whole
// copy to rely on: it is alive, neither drained nor quarantined, and has no such permit itself. So
// of two holders that ask together one is refused. A permit lasts a minute; it ends earlier when
// the node registers or announces without the version.
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
  // "" when another node may rely on this holder.
  std::string why_not_reliable(const Member& holder, const ModelVersion& id, TimePoint now) const;

  const FleetState& fleet_;
  std::map<std::pair<Incarnation, ModelVersion>, TimePoint> valid_until_;
};

}  // namespace rekindle::coordinator
