#include "recovery/swarm/availability.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace rekindle::swarm {

namespace {

// splitmix64: a few instructions, and every bit of the seed counts.
std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t value = state;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

Availability::Availability(const planner::Plan& plan, SourceMask growing)
    : plan_(plan),
      slice_count_(plan.slice_count()),
      candidates_(new GrowingMask[slice_count_]),
      prospects_(new GrowingMask[slice_count_]) {
  std::vector<TileIndex> read;
  first_tile_.reserve(slice_count_);
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    candidates_[slice].add(plan.candidates(slice) & ~growing);
    plan.tiles_read(plan.group_first(slice), read);
    first_tile_.push_back(read.empty() ? 0 : read.front());
  }
}

std::shared_ptr<const SliceTiles> SliceTiles::of(const planner::Plan& plan) {
  const auto tables = std::make_shared<SliceTiles>();
  Rows& tiles_of_slice = tables->tiles_of_slice;
  TileIndex tiles = 0;
  std::vector<TileIndex> read;
  tiles_of_slice.first.push_back(0);
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    plan.tiles_read(slice, read);
    for (const TileIndex tile : read) tiles = std::max(tiles, tile + 1);
    tiles_of_slice.items.insert(tiles_of_slice.items.end(), read.begin(), read.end());
    tiles_of_slice.first.push_back(static_cast<std::uint32_t>(tiles_of_slice.items.size()));
  }
  // The same the other way round: count, sum up, fill in.
  auto& first = tables->slices_of_tile.first;
  auto& items = tables->slices_of_tile.items;
  first.assign(tiles + 1, 0);
  for (const std::uint32_t tile : tiles_of_slice.items) ++first[tile + 1];
  for (TileIndex tile = 0; tile < tiles; ++tile) first[tile + 1] += first[tile];
  items.resize(tiles_of_slice.items.size());
  std::vector<std::uint32_t> next(first.begin(), first.end() - 1);
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    for (const std::uint32_t tile : tiles_of_slice.row(slice)) items[next[tile]++] = slice;
  }
  return tables;
}

JoinTables join_tables(const planner::Plan& plan, const Layout& layout, bool proves_parts,
                       std::shared_ptr<const SliceTiles> tiles) {
  JoinTables tables{layout.digest(), proves_parts, std::vector<bool>(plan.slice_count()),
                    std::move(tiles)};
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    tables.covered[slice] = plan.covered_by(slice, layout, proves_parts);
  }
  if (tables.tiles == nullptr) tables.tiles = SliceTiles::of(plan);
  return tables;
}

void Availability::prepare(JoinTables tables) {
  if (tiles_ == nullptr) tiles_ = std::move(tables.tiles);
  covered_.try_emplace({tables.layout, tables.proves_parts}, std::move(tables.covered));
}

SliceIndex Availability::add_source(SourceIndex source, const Layout& layout, bool proves_parts) {
  const std::pair key(layout.digest(), proves_parts);
  if (!covered_.contains(key)) prepare(join_tables(plan_, layout, proves_parts, tiles_));
  const auto tiles = static_cast<TileIndex>(tiles_->slices_of_tile.first.size() - 1);
  held_.insert_or_assign(source, TileSet(tiles));
  const std::vector<bool>& covered = covered_[key];
  const SourceMask mask = SourceMask::of(source);
  SliceIndex count = 0;
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    if (!covered[slice]) continue;
    prospects_[slice].add(mask);
    ++count;
  }
  return count;
}

bool Availability::holds(const TileSet& held, SliceIndex slice) const {
  const auto tiles = tiles_->tiles_of_slice.row(slice);
  return std::all_of(tiles.begin(), tiles.end(), [&](TileIndex tile) { return held.test(tile); });
}

std::vector<SliceIndex> Availability::extend(SourceIndex source, const TileRuns& runs) {
  std::vector<SliceIndex> gained;
  const auto known = held_.find(source);
  if (known == held_.end()) return gained;
  TileSet& held = known->second;
  const SourceMask mask = SourceMask::of(source);
  for (const auto& [begin, end] : runs) {
    // Tiles behind the last that any slice reads are of no interest.
    for (TileIndex tile = begin; tile < std::min(end, held.size()); ++tile) {
      if (held.test(tile)) continue;
      held.set(tile);
      for (const SliceIndex slice : tiles_->slices_of_tile.row(tile)) {
        if (!prospects(slice).test(source) || candidates(slice).test(source)) continue;
        if (!holds(held, slice)) continue;
        candidates_[slice].add(mask);
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
  const SourceMask mask = SourceMask::of(source);
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    if (!prospects(slice).test(source) || candidates(slice).test(source)) continue;
    candidates_[slice].add(mask);
    gained.push_back(slice);
  }
  return gained;
}

std::uint64_t order_seed(const Incarnation& incarnation) {
  std::uint64_t halves[2];
  std::memcpy(halves, incarnation.bytes.data(), sizeof halves);
  std::uint64_t state = halves[0] ^ (halves[1] << 1);
  return next_random(state);
}

std::vector<SliceIndex> slice_order(const planner::Plan& plan, std::uint64_t seed) {
  std::vector<std::pair<SliceIndex, SliceIndex>> buckets;
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    const bool begins = slice == 0 || plan.bucket(slice) != plan.bucket(slice - 1);
    if (begins) buckets.emplace_back(slice, slice);
    buckets.back().second = slice + 1;
  }
  for (std::size_t i = buckets.size(); i > 1; --i) {
    std::swap(buckets[i - 1], buckets[next_random(seed) % i]);
  }
  std::vector<SliceIndex> order;
  order.reserve(plan.slice_count());
  for (const auto& [begin, end] : buckets) {
    for (SliceIndex slice = begin; slice < end; ++slice) order.push_back(slice);
  }
  return order;
}

SliceCandidates::SliceCandidates(std::shared_ptr<const planner::Plan> plan, SourceMask growing,
                                 std::uint32_t suspicion)
    : plan_(std::move(plan)),
      growing_(growing),
      suspicion_(suspicion),
      availability_(*plan_, growing) {}

void SliceCandidates::add_source(SourceIndex source, std::shared_ptr<const Layout> layout,
                                 bool proves_parts) {
  {
    const std::lock_guard lock(mutex_);
    added_[source] = layout;
  }
  availability_.add_source(source, *layout, proves_parts);
}

std::vector<SliceIndex> SliceCandidates::extend(SourceIndex source, const TileRuns& held) {
  return availability_.extend(source, held);
}

std::vector<SliceIndex> SliceCandidates::complete(SourceIndex source) {
  return availability_.complete(source);
}

transport::SliceInfo SliceCandidates::info(SliceIndex slice) const {
  transport::SliceInfo info{plan_->slice_bytes(slice), availability_.candidates(slice),
                            availability_.prospects(slice)};
  info.key = availability_.key(slice);
  if (plan_->group_size(slice) == 1) return info;
  if (plan_->kind(slice) == planner::SliceKind::kStaged) {
    info.group_first = plan_->group_first(slice);
    info.group_size = plan_->group_size(slice);
  }
  if (suspicion_ == 0) return info;
  if (const SourceMask chosen = chosen_for_group(slice); !chosen.empty()) {
    info.candidates = chosen;
    info.prospects = {};
  }
  return info;
}

// Only a source that holds every slice of the group can answer for all of it. Sources that are
// being filled are left out, because the choice must not change while the group is read.
SourceMask SliceCandidates::chosen_for_group(SliceIndex slice) const {
  const SourceMask candidates = plan_->candidates(slice) & ~growing_;
  const SliceIndex first = plan_->group_first(slice);
  SourceMask common = candidates;
  for (SliceIndex i = first; i < first + plan_->group_size(slice); ++i) {
    common = common & plan_->candidates(i);
  }
  if (common.empty()) return candidates;
  auto skip = (first + suspicion_) % static_cast<std::uint32_t>(common.count());
  for (SourceIndex source = common.next(); source < transport::kMaxSources;
       source = common.next(source + 1)) {
    if (skip-- == 0) return SourceMask::of(source);
  }
  return candidates;
}

void SliceCandidates::expand(SliceIndex slice, SourceIndex source, planner::Expansion& out) const {
  std::shared_ptr<const Layout> layout;
  {
    const std::lock_guard lock(mutex_);
    if (const auto added = added_.find(source); added != added_.end()) layout = added->second;
  }
  if (layout != nullptr) return plan_->expand_from(slice, *layout, out);
  plan_->expand(slice, source, out);
}

std::optional<SourceIndex> SliceCandidates::only_source(SliceIndex first, SliceIndex last) const {
  SourceMask all;
  for (SliceIndex i = first; i <= last; ++i) all = all | info(i).candidates;
  if (all.count() != 1) return std::nullopt;
  return all.next();
}

}  // namespace rekindle::swarm
