#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/checkpoint.h"

// Tiles as a layout holds them: whole in one array, whole but spread over several boxes, or only in
// part (a shard's border cuts through). Whole tiles verify by the publisher's digests, parts by
// digests that their holder made when it had verified them (PartDigest). Pure: bytes come from an
// ArrayOf, which yields the bytes of one entry. Every function here may run inside
// store::guard_mapping_access: none owns memory while it reads those bytes.
namespace rekindle {

using ArrayOf = std::function<std::span<const std::byte>(const LayoutEntry& entry)>;

// Which tiles a layout touches; `partial` are those that it does not hold whole, ascending.
struct LayoutTiles {
  TileSet held;
  std::vector<TileIndex> partial;

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
