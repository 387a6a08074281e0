#pragma once

#include <map>
#include <set>
#include <string>

#include "recovery/coordinator/core/fleet_state.h"

namespace rekindle::coordinator {

// Bounds the versions that exist by name only: claimed, and never READY. Each claimant may have a
// number of them, as far as this coordinator has heard its claims. A claim that no node has held
// anything of for a day is forgotten; a copy that appears later claims its version again.
class OpenClaims {
 public:
  explicit OpenClaims(FleetState& fleet) : fleet_(fleet) {}

  // kExhausted: `claimant` has too many, and `id` would be one more. "": it is not counted.
  Result<void> check(const std::string& claimant, const ModelVersion& id);
  // Its claim was staged.
  void add(const std::string& claimant, const ModelVersion& id);
  // Once a minute: stages the end of claims that nobody has filled.
  void collect(TimePoint now);

 private:
  bool is_open(const ModelVersion& id) const;
  bool is_held(const ModelVersion& id) const;

  FleetState& fleet_;
  std::map<std::string, std::set<ModelVersion>> of_claimant_;
  // Since when no node holds anything of it.
  std::map<ModelVersion, TimePoint> unheld_;
  TimePoint next_collection_{};
};

}  // namespace rekindle::coordinator
