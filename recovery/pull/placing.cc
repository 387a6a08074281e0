#include "recovery/pull/placing.h"

#include <atomic>

#include "src/store/fault_guard.h"
#include "src/tensor/held_tile.h"

namespace rekindle::pull {

namespace {

bool verifies(store::PendingVersion& copy, TileIndex tile, const ArrayOf& array_of) {
  const Manifest& manifest = copy.manifest();
  bool good = false;
  const auto read = store::guard_mapping_access("a tile that was written in place", [&] {
    const auto digest = whole_tile_digest(*manifest.checkpoint, manifest.layout, tile, array_of);
    good = digest && *digest == manifest.checkpoint->tile_digests[tile];
  });
  return read && good;
}

}  // namespace

std::size_t verify_in_place(store::PendingVersion& copy, VerifiedTiles& verified,
                            std::span<const TileIndex> tiles, WorkerPool& pool) {
  const Checkpoint& checkpoint = *copy.manifest().checkpoint;
  const ArrayOf array_of = [&](const LayoutEntry& entry) -> std::span<const std::byte> {
    const TensorInfo& tensor = checkpoint.tensors[entry.tensor];
    return copy.segment(entry.segment)
        .subspan(entry.offset_bytes, entry.box.elements() * dtype_size_bytes(tensor.dtype));
  };
  std::atomic<std::size_t> good = 0;
  pool.parallel_for(tiles.size(), [&](std::size_t i) {
    if (!verifies(copy, tiles[i], array_of)) return;
    copy.mark_verified(tiles[i]);
    verified.set(tiles[i]);
    good.fetch_add(1);
  });
  return good.load();
}

}  // namespace rekindle::pull
