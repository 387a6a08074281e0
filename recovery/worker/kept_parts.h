#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/bucket/segment_keep.h"
#include "src/tensor/tile.h"

namespace rekindle::worker {

// Which tiles of a copy are whole, when several devices have each kept buckets of it. Pure.
class KeptParts {
 public:
  explicit KeptParts(TileIndex tile_count) : tile_count_(tile_count) {}

  // What a device has kept of a party's buckets. Returns the tiles that are whole now, runs in
  // ascending order.
  bucket::TileRuns add(const std::string& party, std::span<const bucket::KeptTiles> kept);

 private:
  const TileIndex tile_count_;
  // Parts of tiles that are not whole; parties have different buckets.
  std::map<std::pair<std::string, TileIndex>, std::uint32_t> parts_;
};

}  // namespace rekindle::worker
