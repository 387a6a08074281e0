#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "recovery/coordinator/core/fleet_state.h"

namespace rekindle::coordinator {

// kStaging: claimed, but the live nodes do not hold all of it. kReady: the live nodes hold all of
// it, verified. kRetiring: retired.
enum class VersionState { kStaging, kReady, kRetiring };

// As in the answer for `rekindle status`.
std::string_view state_name(VersionState state);

// Decides when a version is READY: as soon as the live nodes hold all of it, verified. Either their
// tiles cover it, be it by one whole copy or by shards of several nodes; or each layout of its
// joint publication has a complete copy. A tile may then be whole on no node. READY is marked in
// the catalog, durably, before the announcement that made it so is answered.
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
  bool tiles_cover(const ModelVersion& id, const DurableVersion& version) const;

  FleetState& fleet_;
  TimePoint next_marks_{};
};

struct OpenPullRequest {
  NodeInfo puller;
  std::string model;
  // nullopt: the newest READY version.
  std::optional<std::uint64_t> version;
  std::string shard;
};

// Says which version a request means, or why it cannot be served now: it does not exist, its
// holders are silent, unverified, quarantined or drained, or agents have yet to report.
class VersionResolver {
 public:
  VersionResolver(const FleetState& fleet, const VersionReadiness& readiness)
      : fleet_(fleet), readiness_(readiness) {}

  // kUnavailable: no live node holds all of it now. kNotFound: no such version.
  Result<ModelVersion> resolve(const OpenPullRequest& request, TimePoint now) const;
  // The version, if a broadcast round may bring it to workers.
  Result<DurableVersion> resolve_update(const ModelVersion& id, TimePoint now) const;
  // Live nodes, without the puller, that have a whole copy and have yet to verify it. A pull that
  // finds no source waits for them.
  std::vector<std::string> yet_to_verify(const OpenPullRequest& request) const;
  // The puller needs no source but itself.
  bool holds_all_itself(const ModelVersion& id, const Digest& root,
                        const Incarnation& puller) const;

  // The error when no live node holds anything of `what`.
  Failure no_source(const std::string& what, const std::string& model, TimePoint now) const;
  // kUnavailable: only drained nodes hold a part of this joint publication. The puller would wait
  // for it in vain.
  Result<void> check_drained_parts(const ModelVersion& id, const Incarnation& puller) const;
  // The error when no source was offered and none is busy: its holders are kept away, or there are
  // none.
  Failure nobody_usable(const ModelVersion& id, const Incarnation& puller, TimePoint now) const;

 private:
  // Nothing: no live node has yet to verify it.
  std::optional<Error> waits_for_verification(const ModelVersion& id,
                                              const Incarnation& puller) const;

  const FleetState& fleet_;
  const VersionReadiness& readiness_;
};

}  // namespace rekindle::coordinator
