#include "recovery/joint/part_digests.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "src/store/fault_guard.h"
#include "src/tensor/held_tile.h"
#include "src/tensor/tile_piece.h"

namespace rekindle::joint {

namespace {

// Of tiles that one thread digests before it takes the next ones.
constexpr std::size_t kBatch = 16;

}  // namespace

PartReader::PartReader(const store::SegmentStore& store, WorkerPool& digest_pool,
                       const ModelVersion& id, std::shared_ptr<const JointPlan> plan,
                       std::uint32_t host, std::shared_ptr<store::SegmentStore::StagedPart> part,
                       Layout layout)
    : store_(store),
      digest_pool_(digest_pool),
      plan_(std::move(plan)),
      host_(host),
      part_(std::move(part)),
      layout_(std::move(layout)),
      tiles_(plan_->tiles_of(host)),
      checkpoint_{id, plan_->tensors(), plan_->tiles(), {}, {}} {}

std::span<const std::byte> PartReader::array(const LayoutEntry& entry) const {
  return store_.staged_array(*part_, entry);
}

template <typename Body>
Result<void> PartReader::for_each(std::size_t count, const Body& body) const {
  std::mutex mutex;
  std::optional<Error> error;
  std::atomic<bool> failed = false;
  digest_pool_.parallel_for((count + kBatch - 1) / kBatch, [&](std::size_t batch) {
    for (std::size_t i = batch * kBatch; i < std::min(count, (batch + 1) * kBatch); ++i) {
      if (failed) return;
      if (auto done = body(i); !done) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::move(done).error();
        failed = true;
      }
    }
  });
  if (error) return fail(*std::move(error));
  return {};
}

Result<std::vector<Digest>> PartReader::leaves() const {
  std::vector<Digest> leaves(tiles_.whole.size());
  const std::map<TileIndex, Digest>& known = store_.staged_leaves(*part_);
  const ArrayOf array_of = [this](const LayoutEntry& entry) { return array(entry); };
  TRY_VOID(for_each(leaves.size(), [&](std::size_t i) -> Result<void> {
    if (const auto found = known.find(tiles_.whole[i]); found != known.end()) {
      leaves[i] = found->second;
      return {};
    }
    std::optional<Result<Digest>> leaf;
    TRY_VOID(store::guard_mapping_access("a published segment", [&] {
      leaf = whole_tile_digest(checkpoint_, layout_, tiles_.whole[i], array_of);
    }));
    if (!*leaf) return fail(std::move(*leaf).error());
    leaves[i] = **leaf;
    return {};
  }));
  return leaves;
}

Result<std::vector<PartDigest>> PartReader::part_digests() const {
  const LayoutTiles held = tiles_of_layout(checkpoint_, layout_);
  std::vector<PartDigest> parts(held.partial.size());
  const ArrayOf array_of = [this](const LayoutEntry& entry) { return array(entry); };
  TRY_VOID(for_each(parts.size(), [&](std::size_t i) {
    parts[i].tile = held.partial[i];
    return store::guard_mapping_access("a published segment", [&] {
      parts[i].digest = part_digest(checkpoint_, layout_, held.partial[i], array_of);
    });
  }));
  return parts;
}

Result<std::string> PartReader::pieces_of(TileIndex tile) const {
  const TensorIndex tensor = plan_->tiles().tensor_of(tile);
  const std::uint64_t element_bytes = dtype_size_bytes(plan_->tensors()[tensor].dtype);
  const Box whole = plan_->tiles().tile_box(tile);
  const auto entries = layout_.entries_of(tensor);
  std::string pieces;
  for (const JointPlan::Cell& cell : plan_->cells(tile)) {
    if (!std::ranges::binary_search(cell.hosts, host_)) continue;
    const auto entry = std::ranges::find_if(
        entries, [&](const LayoutEntry& one) { return contains(one.box, cell.box); });
    if (entry == entries.end()) {
      return fail(ErrorCode::kInternal, "no box of this host holds {} of '{}'",
                  cell.box.to_string(), plan_->tensors()[tensor].name);
    }
    const TilePart part{cell.box, whole, element_bytes};
    const std::size_t begin = pieces.size();
    pieces.resize(begin + piece_bytes(part));
    const std::span<char> out(pieces.data() + begin, pieces.size() - begin);
    const auto bytes = array(*entry);
    TRY_VOID(store::guard_mapping_access("a published segment",
                                         [&] { make_piece(part, bytes, entry->box, out); }));
  }
  return pieces;
}

Result<std::vector<std::string>> PartReader::pieces(std::span<const TileIndex> tiles) const {
  std::vector<std::string> pieces(tiles.size());
  TRY_VOID(for_each(tiles.size(), [&](std::size_t i) -> Result<void> {
    TRY(pieces[i], pieces_of(tiles[i]));
    return {};
  }));
  return pieces;
}

}  // namespace rekindle::joint
