#include "recovery/coordinator/core/catalog.h"

#include <algorithm>
#include <utility>

#include "recovery/coordinator/core/seeded_bugs.h"

namespace rekindle::coordinator {

namespace {
constexpr std::size_t kMaxNamedVersions = 8;
// Of a model, so that publishing the same contents again can bring the latest ones back.
constexpr std::size_t kTombstonesKept = 128;
}  // namespace

Catalog::Catalog(DurableState state) : table_(std::move(state)) {
  for (const auto& [id, version] : this->state().versions) {
    if (!version.retiring) live_.insert(id);
  }
}

Durably<void> Catalog::claim(const Claim& claim) {
  const ModelVersion& id = claim.id;
  const auto known = table_.next_version(id);
  if (known && known->root != claim.root) {
    // Another claim may be under way: this one is refused when that one is durable.
    const bool is_durable = find(id) != nullptr;
    return {fail(ErrorCode::kDenied,
                 "{} was published before with other contents (root {}, this one {}); publish "
                 "under a new version",
                 id.to_string(), known->root.hex(), claim.root.hex()),
            is_durable ? 0 : table_.keep_version(id)};
  }
  const std::uint64_t watermark = table_.next_retired_through(id.model);
  if (!known && id.version <= watermark && watermark > 0) {
    return {fail(ErrorCode::kDenied,
                 "{} is too old: all versions of {} up to {} that are not in the table count as "
                 "retired; publish under a higher version",
                 id.to_string(), id.model, watermark)};
  }
  const bool revives = known && claim.revive && known->retiring;
  DurableVersion next{claim.root, claim.tensor_set, claim.checkpoint_bytes};
  if (known && !revives) next = *known;
  if (known) next.replicas = known->replicas;
  if (claim.replicas) next.replicas = claim.replicas;
  if (claim.ready && !next.retiring) next.ready = true;
  if (!known || next != *known) return {{}, table_.set_version(id, next)};
  // An agent that announces what was durable before does not wait for the disk.
  const auto* durable = find(id);
  const bool holds = !claim.revive && durable != nullptr && *durable == next;
  return {{}, holds ? 0 : table_.keep_version(id)};
}

CommitNumber Catalog::mark_ready(const ModelVersion& id) {
  auto next = table_.next_version(id);
  if (!next || next->retiring) return 0;
  if (next->ready) {
    const auto* durable = find(id);
    return durable != nullptr && durable->ready ? 0 : table_.keep_version(id);
  }
  next->ready = true;
  return table_.set_version(id, *next);
}

Durably<void> Catalog::retire(const ModelVersion& id) {
  auto next = table_.next_version(id);
  if (!next) {
    if (is_retired(id)) return {};
    return {fail(ErrorCode::kNotFound, "{} is not known to the coordinator", id.to_string())};
  }
  if (next->retiring) return {{}, table_.keep_version(id)};
  if (seeded(SeededBug::kTombstoneForgotten)) return {{}, table_.erase_version(id)};
  next->retiring = true;
  next->ready = false;
  return {{}, drop_old_tombstones(id.model, table_.set_version(id, *next))};
}

// Half of them at a time, the lowest versions first. The watermark that stands for them becomes
// durable with the same commit or before it.
CommitNumber Catalog::drop_old_tombstones(const std::string& model, CommitNumber commit) {
  std::vector<ModelVersion> tombstones;
  for (auto it = state().versions.lower_bound({model, 0});
       it != state().versions.end() && it->first.model == model; ++it) {
    if (!it->second.retiring) continue;
    const auto next = table_.next_version(it->first);
    if (next && next->retiring) tombstones.push_back(it->first);
  }
  if (tombstones.size() < 2 * kTombstonesKept) return commit;
  tombstones.resize(tombstones.size() - kTombstonesKept);
  for (const ModelVersion& id : tombstones) table_.erase_version(id);
  return table_.set_retired_through(
      model, std::max(table_.next_retired_through(model), tombstones.back().version));
}

CommitNumber Catalog::set_drained(const std::string& node_id, bool drained) {
  if (table_.next_drained(node_id) == drained) return table_.keep_drained(node_id);
  return table_.set_drained(node_id, drained);
}

DurableTable::Ended Catalog::committed(CommitNumber number, bool durable) {
  DurableTable::Ended ended = table_.committed(number, durable);
  for (const ModelVersion& id : ended.versions) {
    const DurableVersion* version = find(id);
    if (version != nullptr && !version->retiring) {
      live_.insert(id);
    } else {
      live_.erase(id);
    }
  }
  return ended;
}

bool Catalog::is_retired(const ModelVersion& id) const {
  if (const DurableVersion* version = find(id)) return version->retiring;
  const auto watermark = state().retired_through.find(id.model);
  return watermark != state().retired_through.end() && watermark->second > 0 &&
         id.version <= watermark->second;
}

const DurableVersion* Catalog::find(const ModelVersion& id) const {
  const auto found = state().versions.find(id);
  return found == state().versions.end() ? nullptr : &found->second;
}

std::uint32_t Catalog::whole_copies(const ModelVersion& id, const Membership& members) const {
  const DurableVersion* version = find(id);
  if (version == nullptr) return 0;
  std::uint32_t copies = 0;
  for (const auto& [node_id, member] : members.all()) {
    for (auto it = member.holdings.lower_bound({id, {}});
         it != member.holdings.end() && it->first.id == id; ++it) {
      const Holding& holding = it->second;
      if (holding.whole && holding.counts() && holding.root == version->root) {
        ++copies;
        break;
      }
    }
  }
  return copies;
}

// What nodes say of their tiles may be less than they have, never more: a version that seems
// covered is.
bool Catalog::is_covered(const ModelVersion& id, const Membership& members) const {
  const DurableVersion* version = find(id);
  if (version == nullptr) return false;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> runs;
  std::uint32_t tiles = 0;
  for (const auto& [node_id, member] : members.all()) {
    for (auto it = member.holdings.lower_bound({id, {}});
         it != member.holdings.end() && it->first.id == id; ++it) {
      const Holding& holding = it->second;
      if (holding.root != version->root) continue;
      if (holding.whole && holding.counts()) return true;
      if (holding.complete && !holding.verified) continue;
      const auto& said = holding.complete ? holding.covers : holding.held;
      runs.insert(runs.end(), said.begin(), said.end());
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

VersionState Catalog::state_of(const ModelVersion& id, const Membership& members) const {
  if (is_retired(id)) return VersionState::kRetiring;
  return is_covered(id, members) ? VersionState::kReady : VersionState::kStaging;
}

std::optional<ModelVersion> Catalog::newest_ready(const std::string& model,
                                                  const Membership& members) const {
  const auto begin = live_.lower_bound({model, 0});
  auto it = live_.upper_bound({model, UINT64_MAX});
  while (it != begin) {
    --it;
    if (state_of(*it, members) == VersionState::kReady) return *it;
  }
  return std::nullopt;
}

std::optional<ModelVersion> Catalog::latest(const std::string& model) const {
  const auto begin = live_.lower_bound({model, 0});
  auto it = live_.upper_bound({model, UINT64_MAX});
  while (it != begin) {
    --it;
    if (find(*it)->ready) return *it;
  }
  return std::nullopt;
}

std::string Catalog::describe_versions(const std::string& model, const Membership& members) const {
  std::string text;
  std::size_t named = 0;
  const auto begin = state().versions.lower_bound({model, 0});
  auto it = state().versions.upper_bound({model, UINT64_MAX});
  while (it != begin && named < kMaxNamedVersions) {
    --it;
    const VersionState state = state_of(it->first, members);
    if (!text.empty()) text += ", ";
    text += fmt::format("{} ({})", it->first.to_string(),
                        state == VersionState::kReady      ? "ready"
                        : state == VersionState::kRetiring ? "retired"
                                                           : "no live whole copy");
    ++named;
  }
  if (it != begin && !text.empty()) text += ", …";
  return text.empty() ? fmt::format("no version of {} is known", model) : "known are: " + text;
}

}  // namespace rekindle::coordinator
