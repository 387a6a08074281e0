#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/tile_proof.h"

// Tiles as a layout holds them: whole in one array, whole but spread over several boxes, or only in
// part (a shard's border cuts through). Whole tiles verify by the publisher's digests, parts by
// digests that their holder made when it had verified them (PartDigest). Pure: bytes come from an
// ArrayOf, which yields the bytes of one entry. Every function here may run inside
// store::guard_mapping_access: none owns memory while it reads those bytes.
namespace rekindle {

using ArrayOf = std::function<std::span<const std::byte>(const LayoutEntry& entry)>;

// A proof (tile_proof.h) that a holder of a part of a tile keeps, so that it can prove the part, or
// a smaller one, to others.
struct KeptProof {
  const LayoutEntry* entry = nullptr;
  Box part;
  TileRange range;
  // Of the proof, in the joined proofs of the tile.
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
// The proofs that are kept of a tile, in the order of `entries`, which are those of its tensor in a
// layout. Empty: none is kept. The layout holds all of the tile or nothing, some part is not one
// run of it, or the proofs would be longer than a 64th of the parts.
std::vector<KeptProof> kept_proofs(std::span<const LayoutEntry> entries, const Box& tile,
                                   std::uint64_t element_bytes);
// The same for a tile of a checkpoint, and the sum of their bytes.
std::vector<KeptProof> kept_proofs(const Checkpoint& checkpoint, const Layout& layout,
                                   TileIndex tile);
std::uint64_t total_bytes(std::span<const KeptProof> proofs);

// Which tiles a layout touches.
struct LayoutTiles {
  TileSet held;
  // Those that it does not hold whole, ascending.
  std::vector<TileIndex> partial;
  // Where the kept proofs of each of them begin among those of all, one more for the end.
  std::vector<std::uint64_t> proofs_begin;

  bool is_partial(TileIndex tile) const;
};
LayoutTiles tiles_of_layout(const Checkpoint& checkpoint, const Layout& layout);

// Digest of everything that the layout holds of the tile, in the order of its entries; differs from
// the tile's own digest also when that is the whole tile.
Digest part_digest(const Checkpoint& checkpoint, const Layout& layout, TileIndex tile,
                   const ArrayOf& array_of);
// The tile's digest as the publisher made it; kNotFound when the layout does not hold it whole.
Result<Digest> whole_tile_digest(const Checkpoint& checkpoint, const Layout& layout, TileIndex tile,
                                 const ArrayOf& array_of);

// Copies the tile to `out`, row-major; false when the layout does not hold it whole.
bool read_tile(const Checkpoint& checkpoint, const Layout& layout, TileIndex tile,
               const ArrayOf& array_of, std::span<std::byte> out);

// Digests the held part of the tile and compares. kCorrupt: the error names tensor, tile and the
// offset in the file. kNotFound: the layout holds nothing of it.
Result<void> verify_tile(const Manifest& manifest, TileIndex tile, const ArrayOf& array_of);

}  // namespace rekindle
