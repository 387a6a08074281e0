#include "recovery/coordinator/core/version_readiness.h"

#include <algorithm>

namespace rekindle::coordinator {

namespace {
constexpr std::size_t kMaxNamedVersions = 8;
constexpr Duration kMarkEvery = std::chrono::seconds(1);

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

// Nodes may list fewer tiles than they have, never more. So a version that seems covered is.
bool VersionReadiness::is_covered(const ModelVersion& id) const {
  const DurableVersion* version = fleet_.catalog.find(id);
  if (version == nullptr) return false;
  TileRuns runs;
  std::uint32_t tiles = 0;
  for (const auto& [node_id, member] : fleet_.members.all()) {
    for (const auto& [key, holding] : member.holdings.of(id)) {
      if (holding.root != version->root) continue;
      if (holding.whole && holding.counts()) return true;
      if (!holding.readable(version->root)) continue;
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

}  // namespace rekindle::coordinator
