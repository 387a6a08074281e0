#include "recovery/swarm/availability.h"

#include <algorithm>

namespace rekindle::swarm {

Availability::Availability(const planner::Plan& plan, SourceMask growing)
    : plan_(plan),
      slice_count_(plan.slice_count()),
      candidates_(new std::atomic<std::uint64_t>[slice_count_]),
      prospects_(new std::atomic<std::uint64_t>[slice_count_]) {
  std::vector<TileIndex> read;
  first_tile_.reserve(slice_count_);
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    candidates_[slice].store((plan.candidates(slice) & ~growing).bits());
    prospects_[slice].store(0);
    plan.tiles_read(plan.group_first(slice), read);
    first_tile_.push_back(read.empty() ? 0 : read.front());
  }
}

void Availability::index_tiles() {
  if (!tiles_of_slice_.first.empty()) return;
  TileIndex tiles = 0;
  std::vector<TileIndex> read;
  tiles_of_slice_.first.push_back(0);
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    plan_.tiles_read(slice, read);
    for (const TileIndex tile : read) tiles = std::max(tiles, tile + 1);
    tiles_of_slice_.items.insert(tiles_of_slice_.items.end(), read.begin(), read.end());
    tiles_of_slice_.first.push_back(static_cast<std::uint32_t>(tiles_of_slice_.items.size()));
  }
  // The same the other way round: count, sum up, fill in.
  auto& first = slices_of_tile_.first;
  first.assign(tiles + 1, 0);
  for (const std::uint32_t tile : tiles_of_slice_.items) ++first[tile + 1];
  for (TileIndex tile = 0; tile < tiles; ++tile) first[tile + 1] += first[tile];
  slices_of_tile_.items.resize(tiles_of_slice_.items.size());
  std::vector<std::uint32_t> next(first.begin(), first.end() - 1);
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    for (const std::uint32_t tile : tiles_of_slice_.row(slice)) {
      slices_of_tile_.items[next[tile]++] = slice;
    }
  }
}

const std::vector<bool>& Availability::covered_by(const Layout& layout) {
  const auto [found, is_new] = covered_.try_emplace(layout.digest());
  if (is_new) {
    found->second.resize(slice_count_);
    for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
      found->second[slice] = plan_.covered_by(slice, layout);
    }
  }
  return found->second;
}

SliceIndex Availability::add_source(SourceIndex source, const Layout& layout) {
  index_tiles();
  const auto tiles = static_cast<TileIndex>(slices_of_tile_.first.size() - 1);
  held_.insert_or_assign(source, TileSet(tiles));
  const std::vector<bool>& covered = covered_by(layout);
  const std::uint64_t bit = std::uint64_t{1} << source;
  SliceIndex count = 0;
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    if (!covered[slice]) continue;
    prospects_[slice].fetch_or(bit, std::memory_order_release);
    ++count;
  }
  return count;
}

bool Availability::holds(const TileSet& held, SliceIndex slice) const {
  const auto tiles = tiles_of_slice_.row(slice);
  return std::all_of(tiles.begin(), tiles.end(), [&](TileIndex tile) { return held.test(tile); });
}

std::vector<SliceIndex> Availability::extend(SourceIndex source, const TileRuns& runs) {
  std::vector<SliceIndex> gained;
  const auto known = held_.find(source);
  if (known == held_.end()) return gained;
  TileSet& held = known->second;
  const std::uint64_t bit = std::uint64_t{1} << source;
  for (const auto& [begin, end] : runs) {
    // Tiles behind the last that any slice reads are of no interest.
    for (TileIndex tile = begin; tile < std::min(end, held.size()); ++tile) {
      if (held.test(tile)) continue;
      held.set(tile);
      for (const SliceIndex slice : slices_of_tile_.row(tile)) {
        if (!prospects(slice).test(source) || candidates(slice).test(source)) continue;
        if (!holds(held, slice)) continue;
        candidates_[slice].fetch_or(bit, std::memory_order_release);
        gained.push_back(slice);
      }
    }
  }
  return gained;
}

std::vector<SliceIndex> Availability::complete(SourceIndex source) {
  const auto known = held_.find(source);
  if (known == held_.end()) return {};
  std::vector<SliceIndex> gained;
  known->second.set_range(0, known->second.size());
  const std::uint64_t bit = std::uint64_t{1} << source;
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    if (!prospects(slice).test(source) || candidates(slice).test(source)) continue;
    candidates_[slice].fetch_or(bit, std::memory_order_release);
    gained.push_back(slice);
  }
  return gained;
}

}  // namespace rekindle::swarm
