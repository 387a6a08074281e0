#include <algorithm>

#include "recovery/coordinator/core/core.h"

// Broadcast rounds: what the core knows of versions and nodes that a round does not.
namespace rekindle::coordinator {

Result<RoundId> Core::begin_update(const ModelVersion& id, const std::string& group,
                                   std::optional<Duration> gather, TimePoint now) {
  tick(now);
  const DurableVersion* version = catalog_.find(id);
  if (catalog_.is_retired(id)) {
    return fail(ErrorCode::kUnavailable,
                "update {}: the version is being retired; publish it again", id.to_string());
  }
  if (in_grace(now)) {  // who has yet to report would be missed
    return fail(ErrorCode::kUnavailable,
                "update {}: the coordinator has just started, agents have yet to report their "
                "workers; retry in {} ms",
                id.to_string(), std::max<std::int64_t>(milliseconds(grace_until_ - now), 1));
  }
  if (version == nullptr || catalog_.state_of(id, members_) != VersionState::kReady) {
    const std::string known = catalog_.describe_versions(id.model, members_);
    if (version == nullptr) {
      return fail(ErrorCode::kNotFound, "update {}: there is no such version; {}", id.to_string(),
                  known);
    }
    return fail(ErrorCode::kUnavailable,
                "update {}: nobody alive holds all of it; start a holder or publish it ({})",
                id.to_string(), known);
  }
  return rounds_.begin(id, version->root, group, gather, epoch(), now);
}

Result<void> Core::report_round(const RoundReport& report, TimePoint now) {
  // As with ranks: its agent will register again and repeat this.
  if (auto heard = hear(report.node_id, report.incarnation, 0, now); !heard) {
    return fail(ErrorCode::kUnavailable, "{}", heard.error().message());
  }
  return rounds_.report(report, now);
}

}  // namespace rekindle::coordinator
