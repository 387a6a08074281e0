#include "recovery/worker/kept_parts.h"

#include <algorithm>

namespace rekindle::worker {

bucket::TileRuns KeptParts::add(const std::string& party, std::span<const bucket::KeptTiles> kept) {
  bucket::TileRuns whole;
  const auto add_whole = [&whole](TileIndex begin, TileIndex end) {
    if (!whole.empty() && whole.back().second == begin) {
      whole.back().second = end;
    } else {
      whole.emplace_back(begin, end);
    }
  };
  for (const bucket::KeptTiles& run : kept) {
    const TileIndex end = std::min(run.end, tile_count_);
    if (run.parts == 0 || run.begin >= end) continue;
    if (run.parts == run.of) {
      add_whole(run.begin, end);
      continue;
    }
    for (TileIndex tile = run.begin; tile < end; ++tile) {
      std::uint32_t& parts = parts_[{party, tile}];
      parts += run.parts;
      if (parts == run.of) add_whole(tile, tile + 1);
    }
  }
  return whole;
}

}  // namespace rekindle::worker
