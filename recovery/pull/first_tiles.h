#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "recovery/planner/slice_plan.h"
#include "src/tensor/tile.h"

namespace rekindle::pull {

// The tiles that a pull fetches before the rest, and their order. Several lists come side by side:
// the n-th tile of each list before the next one of any. Pure.
class FirstTiles {
 public:
  // Tiles out of range are left out.
  FirstTiles(TileIndex tile_count, std::span<const TileRuns> lists);

  // In any list.
  bool contains(TileIndex tile) const { return place_[tile] != kNone; }
  // All tiles but these, and `verified`: a plan that has them fetches only these.
  TileSet all_but(const std::optional<TileSet>& verified) const;
  // All slices of a plan, in the order of their tiles. Groups of slices stay together.
  std::vector<transport::SliceIndex> order(const planner::Plan& plan) const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
  // Of each tile, in its list.
  std::vector<std::uint32_t> place_;
};

}  // namespace rekindle::pull
