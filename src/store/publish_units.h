#pragma once

#include <cstdint>
#include <vector>

#include "src/tensor/layout.h"
#include "src/tensor/tile.h"

namespace rekindle::store {

// Tiles [begin, end) of one layout entry, local to its tensor.
struct UnitPiece {
  std::uint32_t entry = 0;
  std::uint64_t tile_begin = 0;
  std::uint64_t tile_end = 0;
};

// A contiguous range of a segment file and the tiles that lie in it: what one thread copies and
// then digests while the bytes are in its cache.
struct PublishUnit {
  std::uint32_t segment = 0;
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
  std::vector<UnitPiece> pieces;
};

// Units of about `target_bytes` that cover all entries of a layout of whole tensors. A range never
// splits a row of tiles, so wide tensors make larger ones. Headers are not covered.
std::vector<PublishUnit> publish_units(const TensorSet& tensors, const TileMap& tiles,
                                       const Layout& layout, std::uint64_t target_bytes);

}  // namespace rekindle::store
