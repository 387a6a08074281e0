#include "recovery/pull/first_tiles.h"

#include <algorithm>
#include <numeric>

namespace rekindle::pull {

using transport::SliceIndex;

FirstTiles::FirstTiles(TileIndex tile_count, std::span<const TileRuns> lists)
    : place_(tile_count, kNone) {
  for (const TileRuns& runs : lists) {
    std::uint32_t place = 0;
    for (const auto& [begin, end] : runs) {
      for (TileIndex tile = begin; tile < std::min(end, tile_count); ++tile, ++place) {
        place_[tile] = std::min(place_[tile], place);
      }
    }
  }
}

TileSet FirstTiles::all_but(const std::optional<TileSet>& verified) const {
  const auto count = static_cast<TileIndex>(place_.size());
  TileSet others(count);
  for (TileIndex tile = 0; tile < count; ++tile) {
    const bool here = verified && verified->size() == count && verified->test(tile);
    if (here || !contains(tile)) others.set(tile);
  }
  return others;
}

std::vector<SliceIndex> FirstTiles::order(const planner::Plan& plan) const {
  std::vector<std::uint32_t> place(plan.slice_count(), kNone);
  std::vector<TileIndex> tiles;
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    plan.tiles_read(slice, tiles);
    std::uint32_t& of_group = place[plan.group_first(slice)];
    for (const TileIndex tile : tiles) of_group = std::min(of_group, place_[tile]);
  }
  std::vector<SliceIndex> order(plan.slice_count());
  std::iota(order.begin(), order.end(), SliceIndex{0});
  std::ranges::stable_sort(order, {},
                           [&](SliceIndex slice) { return place[plan.group_first(slice)]; });
  return order;
}

}  // namespace rekindle::pull
