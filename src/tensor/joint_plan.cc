#include "src/tensor/joint_plan.h"

#include <algorithm>
#include <limits>

#include "src/base/digest.h"

namespace rekindle {

namespace {

// What the hosts hold of one tile.
struct HeldElements {
  std::uint32_t host = 0;
  std::uint64_t elements = 0;
};

bool is_one_part(std::span<const HeldElements> held, const Box& tile) {
  return std::ranges::all_of(held,
                             [&](const auto& part) { return part.elements == tile.elements(); });
}

void add_held(std::vector<HeldElements>& held, std::uint32_t host, std::uint64_t elements) {
  const auto known = std::ranges::find(held, host, &HeldElements::host);
  if (known == held.end()) {
    held.push_back({host, elements});
  } else {
    known->elements += elements;
  }
}

}  // namespace

std::span<const TensorBox> JointPlan::writes(std::uint32_t rank) const {
  const auto known = rank_by_number_.find(rank);
  if (known == rank_by_number_.end()) return {};
  return ranks_[known->second].writes;
}

std::vector<TensorBox> JointPlan::boxes(std::uint32_t host) const {
  std::vector<TensorBox> boxes;
  for (const std::uint32_t rank : ranks(host)) {
    const auto own = writes(rank);
    boxes.insert(boxes.end(), own.begin(), own.end());
  }
  std::sort(boxes.begin(), boxes.end());
  return boxes;
}

JointPlan::Place JointPlan::place_of(TileIndex tile) const {
  Place place;
  place.tensor = tiles_.tensor_of(tile);
  place.box = tiles_.grid(place.tensor).tile_box(tile - tiles_.first_tile(place.tensor));
  place.near = written_[place.tensor].near(place.box);
  return place;
}

bool JointPlan::is_shared(TileIndex tile) const {
  const Place place = place_of(tile);
  std::vector<HeldElements> held;
  for (const BoxIndex::Entry& entry : place.near) {
    if (const auto part = intersect(*entry.box, place.box)) {
      add_held(held, host_of(entry), part->elements());
    }
  }
  return !is_one_part(held, place.box);
}

std::uint32_t JointPlan::finisher(TileIndex tile) const {
  const Place place = place_of(tile);
  Box first = place.box;
  for (std::size_t i = 0; i < first.rank(); ++i) first.extent[i] = 1;
  std::uint32_t finisher = std::numeric_limits<std::uint32_t>::max();
  for (const BoxIndex::Entry& entry : place.near) {
    if (contains(*entry.box, first)) finisher = std::min(finisher, host_of(entry));
  }
  return finisher;
}

std::vector<JointPlan::Cell> JointPlan::cells(TileIndex tile) const {
  const Place place = place_of(tile);
  std::vector<Box> parts;
  parts.reserve(place.near.size());
  std::vector<BoxIndex::Entry> entries;
  for (const BoxIndex::Entry& entry : place.near) {
    if (const auto part = intersect(*entry.box, place.box)) {
      parts.push_back(*part);
      entries.push_back({&parts.back(), host_of(entry)});
    }
  }
  std::vector<Cell> cells;
  for (OwnedCell& cell : cut_into_cells(entries, std::numeric_limits<std::size_t>::max())) {
    cells.push_back({cell.box, std::move(cell.owners)});
  }
  return cells;
}

JointPlan::HostTiles JointPlan::tiles_of(std::uint32_t host) const {
  HostTiles result;
  const std::vector<TensorBox> own = boxes(host);
  std::vector<std::uint64_t> touched;
  for (std::size_t i = 0; i < own.size();) {
    const TensorIndex tensor = own[i].tensor;
    touched.clear();
    for (; i < own.size() && own[i].tensor == tensor; ++i) {
      tiles_.grid(tensor).tiles_of(own[i].box, touched);
    }
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    for (const std::uint64_t local : touched) {
      const auto tile = static_cast<TileIndex>(tiles_.first_tile(tensor) + local);
      if (!is_shared(tile)) {
        result.whole.push_back(tile);
        continue;
      }
      result.shared.push_back(tile);
      if (finisher(tile) == host) result.finished.push_back(tile);
    }
  }
  return result;
}

std::vector<std::uint32_t> JointPlan::ranks_with(TensorIndex tensor, const Box& box) const {
  std::vector<std::uint32_t> ranks;
  for (const BoxIndex::Entry& entry : written_[tensor].near(box)) {
    if (intersect(*entry.box, box)) ranks.push_back(ranks_[entry.owner].number);
  }
  if (const auto yielded = yielded_.find(tensor); yielded != yielded_.end()) {
    for (const Yielded& other : yielded->second) {
      if (intersect(other.box, box)) ranks.push_back(ranks_[other.rank].number);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::string name_ranks(std::span<const std::uint32_t> ranks) {
  constexpr std::size_t kMostNames = 4;
  constexpr std::size_t kNamesOfMany = 3;
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  if (ranks.size() > kMostNames) {
    return fmt::format("ranks {} and {} more", fmt::join(ranks.first(kNamesOfMany), ", "),
                       ranks.size() - kNamesOfMany);
  }
  return fmt::format("ranks {} and {}", fmt::join(ranks.first(ranks.size() - 1), ", "),
                     ranks.back());
}

}  // namespace rekindle
