#include "recovery/agent/served_versions.h"

#include <algorithm>

#include "recovery/rpc/convert.h"
#include "src/tensor/held_tile.h"
#include "src/tensor/signature_wire.h"

namespace rekindle::agent {

CopyKey key_of(const Manifest& manifest) {
  return {manifest.checkpoint->id, manifest.checkpoint->root, manifest.layout.digest()};
}

namespace {

// In one announcement: the longest runs.
constexpr std::size_t kMaxCoverRuns = 16'384;
// Of a copy that is being filled: a summary, because neighbours hear all of it from this agent.
constexpr std::size_t kMaxHeldRuns = 256;

bool has_all_tensors(const Manifest& manifest) {
  return manifest.layout.payload_bytes() == manifest.checkpoint->tensors.total_bytes();
}

}  // namespace

std::shared_ptr<const swarm::TileRuns> covers_of(const Manifest& manifest) {
  const Checkpoint& checkpoint = *manifest.checkpoint;
  if (has_all_tensors(manifest)) return nullptr;
  LayoutTiles tiles = tiles_of_layout(checkpoint, manifest.layout);
  for (const TileIndex tile : tiles.partial) tiles.held.reset(tile);
  return std::make_shared<swarm::TileRuns>(swarm::summarize(tiles.held.ranges(), kMaxCoverRuns));
}

ServedVersions::~ServedVersions() {
  for (const auto& [key, served] : served_) {
    for (const auto& region : served.regions) registry_.remove(region);
  }
}

bool Served::verified() const {
  return stored != nullptr && stored->verification->state() == store::CopyState::kVerified;
}

bool Served::whole() const { return has_all_tensors(*manifest); }

std::span<const std::byte> Served::array(const LayoutEntry& entry) const {
  const TensorInfo& tensor = checkpoint().tensors[entry.tensor];
  return segments[entry.segment]->bytes().subspan(
      entry.offset_bytes, entry.box.elements() * dtype_size_bytes(tensor.dtype));
}

void ServedVersions::add(const std::shared_ptr<const store::StoredVersion>& stored,
                         std::shared_ptr<const swarm::TileRuns> covers) {
  const CopyKey key = key_of(stored->manifest);
  const auto found = served_.find(key);
  const auto is_same = [&stored](const Served& served) {
    return std::equal(served.segments.begin(), served.segments.end(), stored->segments.begin(),
                      stored->segments.end());
  };
  if (found != served_.end() && is_same(found->second)) {
    // The store has kept the segments of the pull, so the regions and sessions stay valid.
    found->second.manifest = std::shared_ptr<const Manifest>(stored, &stored->manifest);
    found->second.stored = stored;
    found->second.held = nullptr;
    found->second.covers = std::move(covers);
    return;
  }
  // The store has replaced the copy that is there.
  remove_copy(key);
  Served served;
  served.manifest = std::shared_ptr<const Manifest>(stored, &stored->manifest);
  served.stored = stored;
  served.covers = std::move(covers);
  for (const auto& segment : stored->segments) {
    served.segments.push_back(segment);
    served.regions.push_back(
        registry_.add(segment->bytes(), segment->fd(), 0, segment->path(), stored));
  }
  emplace(key, std::move(served));
}

void ServedVersions::add_pending(const store::PendingVersion& pending,
                                 std::shared_ptr<const swarm::HeldTiles> held, bool for_round) {
  const Manifest& manifest = pending.manifest();
  const CopyKey key = key_of(manifest);
  if (served_.contains(key)) return;
  Served served;
  served.manifest = std::make_shared<const Manifest>(manifest);
  served.held = std::move(held);
  served.for_round = for_round;
  for (std::uint32_t i = 0; i < manifest.layout.segments().size(); ++i) {
    auto segment = pending.mapped(i);
    // Without a path, because the commit renames the file.
    served.regions.push_back(registry_.add(segment->bytes(), segment->fd(), 0, {}, segment));
    served.segments.push_back(std::move(segment));
  }
  emplace(key, std::move(served));
}

void ServedVersions::emplace(const CopyKey& key, Served served) {
  served.number = ++last_number_;
  const auto at = served_.emplace(key, std::move(served)).first;
  if (holder_ != nullptr) holder_->hold(at->second);
}

std::map<CopyKey, Served>::iterator ServedVersions::erase(std::map<CopyKey, Served>::iterator at) {
  if (holder_ != nullptr) holder_->drop(at->second.number);
  return served_.erase(at);
}

void ServedVersions::hold_with(Holder* holder) {
  holder_ = holder;
  if (holder_ == nullptr) return;
  for (const auto& [key, served] : served_) holder_->hold(served);
}

std::vector<transport::RegionKey> ServedVersions::withdraw_pending(const CopyKey& key) {
  const auto found = served_.find(key);
  if (found == served_.end() || found->second.complete()) return {};
  auto regions = std::move(found->second.regions);
  erase(found);
  return regions;
}

void ServedVersions::remove(const ModelVersion& id) {
  for (auto it = served_.begin(); it != served_.end();) {
    if (it->second.checkpoint().id != id) {
      ++it;
      continue;
    }
    for (const auto& region : it->second.regions) registry_.remove(region);
    it = erase(it);
  }
}

void ServedVersions::remove_copy(const CopyKey& key) {
  const auto found = served_.find(key);
  if (found == served_.end()) return;
  for (const auto& region : found->second.regions) registry_.remove(region);
  erase(found);
}

const Served* ServedVersions::find(const CopyKey& key) const {
  const auto found = served_.find(key);
  return found == served_.end() ? nullptr : &found->second;
}

std::vector<const Served*> ServedVersions::find(const ModelVersion& id) const {
  std::vector<const Served*> found;
  for (const auto& [key, served] : served_) {
    if (served.checkpoint().id == id) found.push_back(&served);
  }
  return found;
}

std::shared_ptr<const Checkpoint> ServedVersions::checkpoint(const Digest& root) const {
  const auto found =
      std::ranges::find(served_, root, [](const auto& item) { return item.first.root; });
  return found == served_.end() ? nullptr : found->second.manifest->checkpoint;
}

std::optional<std::string> ServedVersions::layout_bytes(const Digest& digest) const {
  for (const auto& [key, served] : served_) {
    if (key.layout == digest) return served.manifest->layout.serialize();
  }
  return std::nullopt;
}

std::optional<std::string> ServedVersions::tensor_set_bytes(const Digest& digest) const {
  for (const auto& [key, served] : served_) {
    const auto& tensors = served.checkpoint().tensors;
    if (tensors.digest() == digest) return tensors.serialize();
  }
  return std::nullopt;
}

std::optional<std::uint64_t> ServedVersions::newest_version(const std::string& model) const {
  std::optional<std::uint64_t> newest;
  for (const auto& [key, served] : served_) {
    const ModelVersion& id = served.checkpoint().id;
    if (served.complete() && id.model == model) newest = std::max(newest.value_or(0), id.version);
  }
  return newest;
}

proto::Holding make_holding(const Served& served) {
  const Checkpoint& checkpoint = served.checkpoint();
  const Layout& layout = served.manifest->layout;
  proto::Holding holding;
  *holding.mutable_id() = rpc::to_proto(checkpoint.id);
  *holding.mutable_root() = rpc::to_proto(checkpoint.root);
  *holding.mutable_tensor_set() = rpc::to_proto(checkpoint.tensors.digest());
  *holding.mutable_layout() = rpc::to_proto(layout.digest());
  holding.set_payload_bytes(layout.payload_bytes());
  holding.set_checkpoint_bytes(checkpoint.tensors.total_bytes());
  holding.set_complete(served.complete());
  holding.set_verified(served.verified());
  holding.set_proves_parts(served.proves_parts());
  if (!served.complete()) {
    *holding.mutable_held() =
        rpc::to_proto(swarm::summarize(served.held->snapshot().ranges(), kMaxHeldRuns));
  }
  holding.set_whole(served.whole());
  if (served.complete() && served.covers != nullptr) {
    *holding.mutable_covers() = rpc::to_proto(*served.covers);
  }
  holding.set_checkpoint_tiles(checkpoint.tiles.tile_count());
  *holding.mutable_signatures() = to_proto(checkpoint.signatures);
  // One layout of a joint publication is enough: without it the version is incomplete anyway.
  const std::vector<Digest>& parts = served.manifest->part_layouts;
  if (!parts.empty() && parts.front() == layout.digest()) {
    holding.set_part_layouts(std::string(digest_bytes(parts)));
  }
  return holding;
}

}  // namespace rekindle::agent
