#include "recovery/coordinator/core/catalog.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {
// Of each model. Publishing the same contents again brings a kept version back.
constexpr std::size_t kTombstonesKept = 128;
}  // namespace

Catalog::Catalog(DurableTable& table) : table_(table) {
  for (const auto& [id, version] : all()) {
    if (!version.retiring) live_.insert(id);
  }
}

Durably<void> Catalog::claim(const Claim& claim) {
  const ModelVersion& id = claim.id;
  const auto known = table_.next_version(id);
  const bool vouched = claim.published || claim.vouched;
  if (known && known->root != claim.root) {
    // Another claim may be under way. This one is refused once that one is durable.
    const bool is_durable = find(id) != nullptr;
    return {fail(ErrorCode::kDenied,
                 "{} was {} before with other contents (root {}, this one {}); publish under a new "
                 "version",
                 id.to_string(), known->announced ? "announced by a member" : "published",
                 known->root.hex(), claim.root.hex()),
            is_durable ? 0 : table_.keep_version(id)};
  }
  const std::uint64_t watermark = table_.next_retired_through(id.model);
  if (!known && id.version <= watermark && watermark > 0) {
    return {fail(ErrorCode::kDenied,
                 "{} is too old: all versions of {} up to {} that are not in the table count as "
                 "retired; publish under a higher version",
                 id.to_string(), id.model, watermark)};
  }
  const bool revives = known && claim.published && known->retiring;
  DurableVersion next{claim.root, claim.tensor_set, claim.checkpoint_bytes};
  next.announced = !vouched;
  if (known && !revives) next = *known;
  if (known) {
    next.replicas = known->replicas;
    next.parts = known->parts;
  }
  if (vouched) next.announced = false;
  if (claim.replicas) next.replicas = claim.replicas;
  if (!claim.parts.empty()) next.parts = claim.parts;
  if (claim.ready && !next.retiring) next.ready = true;
  if (!known || next != *known) return {{}, table_.set_version(id, next)};
  // An agent that announces durable versions does not wait for the disk.
  const auto* durable = find(id);
  const bool holds = !claim.published && durable != nullptr && *durable == next;
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
  next->retiring = true;
  next->ready = false;
  return {{}, drop_old_tombstones(id.model, table_.set_version(id, *next))};
}

// Drops half of the tombstones at a time, the lowest versions first. The watermark that stands for
// them becomes durable with the same commit or before it.
CommitNumber Catalog::drop_old_tombstones(const std::string& model, CommitNumber commit) {
  std::vector<ModelVersion> tombstones;
  for (auto it = all().lower_bound({model, 0}); it != all().end() && it->first.model == model;
       ++it) {
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

void Catalog::changed(const std::vector<ModelVersion>& ids) {
  for (const ModelVersion& id : ids) {
    const DurableVersion* version = find(id);
    if (version != nullptr && !version->retiring) {
      live_.insert(id);
    } else {
      live_.erase(id);
    }
  }
}

bool Catalog::is_retired(const ModelVersion& id) const {
  if (const DurableVersion* version = find(id)) return version->retiring;
  const auto& watermarks = table_.state().retired_through;
  const auto watermark = watermarks.find(id.model);
  return watermark != watermarks.end() && watermark->second > 0 && id.version <= watermark->second;
}

const DurableVersion* Catalog::find(const ModelVersion& id) const {
  const auto found = all().find(id);
  return found == all().end() ? nullptr : &found->second;
}

std::optional<ModelVersion> Catalog::latest(const std::string& model) const {
  const auto begin = live_.lower_bound({model, 0});
  for (auto it = live_.upper_bound({model, UINT64_MAX}); it != begin;) {
    const DurableVersion& version = *find(*--it);
    if (version.ready && !version.announced) return *it;
  }
  const auto lowest_claim =
      std::ranges::find_if(all().lower_bound({model, 0}), all().upper_bound({model, UINT64_MAX}),
                           [](const auto& entry) { return !entry.second.announced; });
  const bool claimed = lowest_claim != all().end() && lowest_claim->first.model == model;
  const auto& watermarks = table_.state().retired_through;
  const auto watermark = watermarks.find(model);
  if (watermark != watermarks.end() && watermark->second > 0) return std::nullopt;
  const auto end =
      claimed ? live_.lower_bound(lowest_claim->first) : live_.upper_bound({model, UINT64_MAX});
  for (auto it = end; it != begin;) {
    if (find(*--it)->ready) return *it;
  }
  return std::nullopt;
}

}  // namespace rekindle::coordinator
