#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/fleet_state.h"
#include "recovery/coordinator/core/version_readiness.h"

namespace rekindle::coordinator {

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
