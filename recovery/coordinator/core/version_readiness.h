#pragma once

#include <cstdint>
#include <string>

#include "recovery/coordinator/core/fleet_state.h"

namespace rekindle::coordinator {

// kStaging: claimed, but the live nodes do not hold all of it. kReady: the verified tiles of the
// live nodes are all tiles of the checkpoint. kRetiring: retired.
enum class VersionState { kStaging, kReady, kRetiring };

// Decides when a version is READY: as soon as the verified tiles of the live nodes cover it, be it
// by one whole copy or by shards of several nodes. READY is marked in the catalog, durably, before
// the announcement that made it so is answered.
class VersionReadiness {
 public:
  explicit VersionReadiness(FleetState& fleet) : fleet_(fleet) {}

  VersionState state_of(const ModelVersion& id) const;
  bool is_covered(const ModelVersion& id) const;
  std::uint32_t whole_copies(const ModelVersion& id) const;
  // "qwen3@41 (ready), qwen3@40 (no live whole copy)": for error texts, newest first, a few.
  std::string describe_versions(const std::string& model) const;

  // Marks the version if it is covered. Returns the commit that makes the mark durable; 0: it is
  // not covered, or is marked already.
  CommitNumber mark(const ModelVersion& id);
  // Once a second: repeats marks that failed with their batch, and makes those that no announcement
  // brought about.
  void mark_all(TimePoint now);

 private:
  FleetState& fleet_;
  TimePoint next_marks_{};
};

}  // namespace rekindle::coordinator
