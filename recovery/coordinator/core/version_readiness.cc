#include "recovery/coordinator/core/version_readiness.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/ranges.h>

#include "recovery/coordinator/core/part_holders.h"

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxNamedVersions = 8;
constexpr Duration kMarkEvery = std::chrono::seconds(1);

Failure only_drained(const ModelVersion& id, const std::string& what,
                     const std::vector<std::string>& nodes) {
  return fail(ErrorCode::kUnavailable,
              "{}: only drained nodes hold {}: {}; end that with `rekindle drain NODE --undo`, or "
              "keep more copies (`rekindle publish --replicas`)",
              id.to_string(), what, fmt::join(nodes, ", "));
}

std::string_view describe(VersionState state) {
  switch (state) {
    case VersionState::kReady:
      return "ready";
    case VersionState::kRetiring:
      return "retired";
    case VersionState::kStaging:
      break;
  }
  return "no live whole copy";
}

}  // namespace

std::uint32_t VersionReadiness::whole_copies(const ModelVersion& id) const {
  const DurableVersion* version = fleet_.catalog.find(id);
  if (version == nullptr) return 0;
  return static_cast<std::uint32_t>(std::ranges::count_if(
      fleet_.members.all(),
      [&](const auto& entry) { return entry.second.holdings.holds_whole(id, version->root); }));
}

// Nodes may list fewer tiles than they have, never more. So a version that seems covered is. That
// the union of the parts is the version is the word of the node that claimed it.
bool VersionReadiness::is_covered(const ModelVersion& id) const {
  const DurableVersion* version = fleet_.catalog.find(id);
  if (version == nullptr) return false;
  // A dead member has no holdings.
  const auto any = [](const Member&) { return true; };
  return tiles_cover(id, *version) || all_parts_held(fleet_.members, id, *version, any);
}

bool VersionReadiness::tiles_cover(const ModelVersion& id, const DurableVersion& version) const {
  TileRuns runs;
  std::uint32_t tiles = 0;
  for (const auto& [node_id, member] : fleet_.members.all()) {
    for (const auto& [key, holding] : member.holdings.of(id)) {
      if (holding.root != version.root) continue;
      if (holding.whole && holding.counts()) return true;
      if (!holding.readable(version.root)) continue;
      const TileRuns& listed = holding.complete ? holding.covers : holding.held;
      runs.insert(runs.end(), listed.begin(), listed.end());
      tiles = std::max(tiles, holding.checkpoint_tiles);
    }
  }
  if (tiles == 0) return false;
  std::ranges::sort(runs);
  std::uint32_t covered = 0;
  for (const auto& [begin, end] : runs) {
    if (begin > covered) return false;
    covered = std::max(covered, end);
  }
  return covered >= tiles;
}

VersionState VersionReadiness::state_of(const ModelVersion& id) const {
  if (fleet_.catalog.is_retired(id)) return VersionState::kRetiring;
  return is_covered(id) ? VersionState::kReady : VersionState::kStaging;
}

std::string VersionReadiness::describe_versions(const std::string& model) const {
  std::string text;
  std::size_t named = 0;
  const auto& versions = fleet_.catalog.all();
  const auto begin = versions.lower_bound({model, 0});
  auto it = versions.upper_bound({model, UINT64_MAX});
  while (it != begin && named < kMaxNamedVersions) {
    --it;
    if (!text.empty()) text += ", ";
    text += fmt::format("{} ({})", it->first.to_string(), describe(state_of(it->first)));
    ++named;
  }
  if (it != begin && !text.empty()) text += ", …";
  return text.empty() ? fmt::format("no version of {} is known", model) : "known are: " + text;
}

CommitNumber VersionReadiness::mark(const ModelVersion& id) {
  const DurableVersion* version = fleet_.catalog.find(id);
  if (version == nullptr || version->retiring || version->ready || !is_covered(id)) return 0;
  return fleet_.catalog.mark_ready(id);
}

void VersionReadiness::mark_all(TimePoint now) {
  if (now < next_marks_) return;
  next_marks_ = now + kMarkEvery;
  for (const ModelVersion& id : fleet_.catalog.live()) mark(id);
}

Failure VersionResolver::no_source(const std::string& what, const std::string& model,
                                   TimePoint now) const {
  if (fleet_.grace.active(now)) {
    return fail(ErrorCode::kUnavailable,
                "{}: the coordinator has just started and agents are still reporting in; retry in "
                "{} ms",
                what, fleet_.grace.left_ms(now));
  }
  return fail(ErrorCode::kNotFound, "{}: no live agent holds it; {}", what,
              readiness_.describe_versions(model));
}

std::vector<std::string> VersionResolver::yet_to_verify(const OpenPullRequest& request) const {
  auto version = request.version;
  if (!version) {
    if (const auto newest = fleet_.catalog.latest(request.model)) version = newest->version;
  }
  const auto waits_for = [&](const ModelVersion& id, const Holding& holding) {
    if (id.model != request.model || (version && id.version != *version)) return false;
    if (!holding.complete || holding.verified || fleet_.catalog.is_retired(id)) return false;
    const DurableVersion* const known = fleet_.catalog.find(id);
    return known == nullptr || holding.root == known->root;
  };
  std::vector<std::string> names;
  for (const auto& [node_id, member] : fleet_.members.all()) {
    if (member.is_dead() || member.info.incarnation == request.puller.incarnation) continue;
    if (std::ranges::any_of(member.holdings.all(), [&](const auto& held) {
          return waits_for(held.first.id, held.second);
        })) {
      names.push_back(node_id);
    }
  }
  return names;
}

std::optional<Error> VersionResolver::waits_for_verification(const ModelVersion& id,
                                                             const Incarnation& puller) const {
  OpenPullRequest request;
  request.puller.incarnation = puller;
  request.model = id.model;
  request.version = id.version;
  const auto names = yet_to_verify(request);
  if (names.empty()) return std::nullopt;
  return Error(ErrorCode::kUnavailable,
               fmt::format("{}: its holder has yet to verify it: {}; retry in a while",
                           id.to_string(), fmt::join(names, ", ")));
}

bool VersionResolver::holds_all_itself(const ModelVersion& id, const Digest& root,
                                       const Incarnation& puller) const {
  return std::ranges::any_of(fleet_.members.all(), [&](const auto& entry) {
    const Member& member = entry.second;
    return member.info.incarnation == puller && member.holdings.holds_whole(id, root);
  });
}

Result<void> VersionResolver::check_drained_parts(const ModelVersion& id,
                                                  const Incarnation& puller) const {
  const DurableVersion* version = fleet_.catalog.find(id);
  if (version == nullptr || version->parts.empty()) return {};
  const auto usable = [&](const Member& member) {
    return member.info.incarnation == puller || !fleet_.drained(member.info.node_id);
  };
  const std::set<Digest> parts = parts_held(fleet_.members, id, *version, usable);
  std::vector<std::string> drained;
  for (const auto& [node_id, member] : fleet_.members.all()) {
    if (usable(member) && member.holdings.holds_whole(id, version->root)) return {};
    if (!std::ranges::includes(parts, parts_of(member, id, *version))) drained.push_back(node_id);
  }
  if (drained.empty()) return {};
  return only_drained(id, "a part of it", drained);
}

Failure VersionResolver::nobody_usable(const ModelVersion& id, const Incarnation& puller,
                                       TimePoint now) const {
  if (auto unverified = waits_for_verification(id, puller)) return fail(*std::move(unverified));
  std::vector<std::string> quarantined;
  std::vector<std::string> drained;
  Duration longest{};
  for (const auto& [node_id, member] : fleet_.members.all()) {
    if (member.is_dead() || !member.holdings.holds(id)) continue;
    if (const TimePoint until = member.standing.kept_from_until(puller); until > now) {
      quarantined.push_back(node_id);
      longest = std::max<Duration>(longest, until - now);
    } else if (fleet_.drained(node_id)) {
      drained.push_back(node_id);
    }
  }
  if (!drained.empty()) return only_drained(id, "it", drained);
  if (quarantined.empty()) return no_source(id.to_string(), id.model, now);
  return fail(ErrorCode::kUnavailable,
              "{}: all that hold it have served wrong bytes and are quarantined for {} ms: {}; "
              "run `rekindle verify` there, or retire and publish it again",
              id.to_string(), milliseconds(longest), fmt::join(quarantined, ", "));
}

Result<ModelVersion> VersionResolver::resolve(const OpenPullRequest& request, TimePoint now) const {
  if (!request.version) {
    const auto newest = fleet_.catalog.latest(request.model);
    if (!newest) return no_source(request.model, request.model, now);
    if (readiness_.state_of(*newest) == VersionState::kReady) return *newest;
    return fail(ErrorCode::kUnavailable,
                "{} is the newest version of {}, and the nodes that hold it are not heard of (or "
                "have yet to verify it) now; retry, start one of them, or retire it to go back to "
                "an older version",
                newest->to_string(), request.model);
  }
  const ModelVersion id{request.model, *request.version};
  if (fleet_.catalog.is_retired(id)) {
    return fail(ErrorCode::kNotFound, "{} is retired; {}", id.to_string(),
                readiness_.describe_versions(request.model));
  }
  if (fleet_.catalog.find(id) == nullptr) {
    // An unverified copy does not vouch for its version until its node has verified it.
    if (auto unverified = waits_for_verification(id, request.puller.incarnation)) {
      return fail(*std::move(unverified));
    }
    return no_source(id.to_string(), request.model, now);
  }
  return id;
}

Result<DurableVersion> VersionResolver::resolve_update(const ModelVersion& id,
                                                       TimePoint now) const {
  if (fleet_.catalog.is_retired(id)) {
    return fail(ErrorCode::kUnavailable,
                "update {}: the version is being retired; publish it again", id.to_string());
  }
  // A round that began now would miss the workers whose agents have yet to report.
  if (fleet_.grace.active(now)) {
    return fail(ErrorCode::kUnavailable,
                "update {}: the coordinator has just started, agents have yet to report their "
                "workers; retry in {} ms",
                id.to_string(), fleet_.grace.left_ms(now));
  }
  const DurableVersion* version = fleet_.catalog.find(id);
  if (version == nullptr) {
    return fail(ErrorCode::kNotFound, "update {}: there is no such version; {}", id.to_string(),
                readiness_.describe_versions(id.model));
  }
  if (readiness_.state_of(id) != VersionState::kReady) {
    return fail(ErrorCode::kUnavailable,
                "update {}: nobody alive holds all of it; start a holder or publish it ({})",
                id.to_string(), readiness_.describe_versions(id.model));
  }
  return *version;
}

std::string_view state_name(VersionState state) {
  switch (state) {
    case VersionState::kStaging:
      return "staging";
    case VersionState::kReady:
      return "ready";
    case VersionState::kRetiring:
      return "retiring";
  }
  return "unknown";
}

}  // namespace rekindle::coordinator
