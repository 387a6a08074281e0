#include "recovery/worker/portion.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "recovery/pull/tile_verifier.h"
#include "recovery/pull/wanted.h"
#include "recovery/worker/worker_wire.h"

namespace rekindle::worker {

namespace {

// Returns the copy's config.json; "" if the copy has none, or none that matches its digest. The
// copy may not have verified yet, and a wrong config.json would choose wrong boxes.
std::string config_of(const store::StoredVersion& stored) {
  const Checkpoint& checkpoint = *stored.manifest.checkpoint;
  const auto tensor = checkpoint.tensors.find(fmt::format("{}config.json", kFileTensorPrefix));
  if (!tensor) return {};
  auto config =
      pull::read_verified_file(checkpoint, stored.manifest.layout, *tensor,
                               [&](const LayoutEntry& entry) { return stored.array(entry); });
  return std::move(config).value_or(std::string());
}

// Returns the tiles that the boxes touch, and the bytes of the boxes.
std::pair<TileSet, std::uint64_t> measure(const Checkpoint& checkpoint,
                                          const std::vector<TensorBox>& boxes) {
  TileSet tiles(checkpoint.tiles.tile_count());
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> touched;
  for (const auto& [tensor, box] : boxes) {
    bytes += box.elements() * dtype_size_bytes(checkpoint.tensors[tensor].dtype);
    if (box.empty()) continue;
    touched.clear();
    checkpoint.tiles.grid(tensor).tiles_of(box, touched);
    for (const auto tile : touched) {
      tiles.set(checkpoint.tiles.first_tile(tensor) + static_cast<TileIndex>(tile));
    }
  }
  return {std::move(tiles), bytes};
}

bool same(const std::weak_ptr<const store::StoredVersion>& before,
          const std::shared_ptr<const store::StoredVersion>& now) {
  return before.lock() == now;
}

}  // namespace

std::shared_ptr<const Portion> Portion::make(const Checkpoint& checkpoint, Layout layout,
                                             std::vector<TensorBox> wanted) {
  const auto boxes = wanted.empty() ? layout.boxes() : wanted;
  auto [held, payload_bytes] = measure(checkpoint, boxes);
  const Digest contents = bucket::digest_of(checkpoint.tensors, boxes);
  auto pieces = bucket::keys_of(checkpoint.tensors, boxes);
  std::string encoded = encode_portion(checkpoint, layout, wanted);
  return std::make_shared<const Portion>(Portion{std::move(layout), std::move(wanted),
                                                 std::move(held), payload_bytes, contents,
                                                 std::move(pieces), std::move(encoded)});
}

Result<Found> find_portion(const Copies& copies, const Wanted& wanted) {
  const pull::WantedSpec spec{wanted.shard, wanted.spec_json, "", wanted.boxes};
  std::shared_ptr<const store::StoredVersion> second;
  std::vector<TensorBox> parts;
  for (const auto& stored : copies) {
    const Checkpoint& checkpoint = *stored->manifest.checkpoint;
    auto boxes =
        wanted_boxes(spec, checkpoint, spec.needs_config() ? config_of(*stored) : std::string());
    if (!boxes) {
      // Every copy of the version has these tensors, so another copy would not help. A shard may
      // lack config.json; the pull that follows finds it, or reports that it is missing.
      if (!spec.needs_config()) return fail(std::move(boxes).error());
      continue;
    }
    TRY(auto view, pull::view_of(checkpoint.tensors, stored->manifest.layout, *boxes));
    if (view) return Found{stored, Portion::make(checkpoint, std::move(*view), {})};
    if (second == nullptr && pull::covers(stored->manifest.layout, *boxes)) {
      second = stored;
      parts = std::move(*boxes);
    }
  }
  if (second == nullptr) return Found();
  const Manifest& manifest = second->manifest;
  return Found{second, Portion::make(*manifest.checkpoint, manifest.layout, std::move(parts))};
}

Found RecentPortions::find(const Copies& copies, const Wanted& wanted) const {
  for (const Entry& entry : entries_) {
    if (entry.wanted != wanted || !std::ranges::equal(entry.copies, copies, same)) continue;
    if (auto stored = entry.stored.lock()) return {std::move(stored), entry.portion};
  }
  return {};
}

void RecentPortions::add(const Copies& copies, const Wanted& wanted, const Found& found) {
  std::erase_if(entries_, [&](const Entry& entry) {
    return entry.wanted == wanted || entry.stored.expired();
  });
  if (entries_.size() == kMost) entries_.pop_front();
  entries_.push_back({wanted, {copies.begin(), copies.end()}, found.stored, found.portion});
}

}  // namespace rekindle::worker
