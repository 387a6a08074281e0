#include "src/tensor/box_index.h"

#include <algorithm>
#include <utility>

namespace rekindle {

namespace {

std::size_t choose_axis(std::span<const BoxIndex::Entry> entries) {
  const std::size_t rank = entries.empty() ? 0 : entries[0].box->rank();
  std::size_t best = 0;
  std::size_t most = 0;
  std::vector<std::uint64_t> offsets;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    offsets.clear();
    for (const BoxIndex::Entry& entry : entries) offsets.push_back(entry.box->offset[axis]);
    std::sort(offsets.begin(), offsets.end());
    const auto end = std::unique(offsets.begin(), offsets.end());
    const auto distinct = static_cast<std::size_t>(end - offsets.begin());
    if (distinct > most) {
      most = distinct;
      best = axis;
    }
  }
  return best;
}

std::uint64_t end_of(const Box& box, std::size_t axis) {
  return box.rank() == 0 ? 1 : box.offset[axis] + box.extent[axis];
}

std::uint64_t begin_of(const Box& box, std::size_t axis) {
  return box.rank() == 0 ? 0 : box.offset[axis];
}

}  // namespace

BoxIndex::BoxIndex(std::vector<Entry> entries) : entries_(std::move(entries)) {
  if (entries_.size() > 1) {
    axis_ = choose_axis(entries_);
    std::sort(entries_.begin(), entries_.end(), [&](const Entry& a, const Entry& b) {
      const std::uint64_t at = begin_of(*a.box, axis_);
      const std::uint64_t other = begin_of(*b.box, axis_);
      if (at != other) return at < other;
      if (*a.box != *b.box) return *a.box < *b.box;
      return a.owner < b.owner;
    });
  }
  max_end_.reserve(entries_.size());
  std::uint64_t end = 0;
  for (const Entry& entry : entries_) {
    end = std::max(end, end_of(*entry.box, axis_));
    max_end_.push_back(end);
  }
}

std::span<const BoxIndex::Entry> BoxIndex::near(const Box& box) const {
  const std::uint64_t begin = begin_of(box, axis_);
  const std::uint64_t end = end_of(box, axis_);
  const auto first = std::upper_bound(max_end_.begin(), max_end_.end(), begin) - max_end_.begin();
  const auto last =
      std::partition_point(entries_.begin() + first, entries_.end(),
                           [&](const Entry& entry) { return begin_of(*entry.box, axis_) < end; });
  return {entries_.begin() + first, last};
}

std::optional<std::pair<BoxIndex::Entry, BoxIndex::Entry>> BoxIndex::find_overlap() const {
  for (const Entry& entry : entries_) {
    for (const Entry& before : near(*entry.box)) {
      if (&before >= &entry) break;
      if (intersect(*before.box, *entry.box)) return std::pair(before, entry);
    }
  }
  return std::nullopt;
}

std::vector<OwnedCell> cut_into_cells(std::span<const BoxIndex::Entry> boxes,
                                      std::size_t max_cells) {
  std::vector<OwnedCell> cells;
  std::vector<OwnedCell> next;
  std::vector<Box> fresh;
  std::vector<Box> pieces;
  const auto without = [&](std::vector<Box>& list, const Box& box) {
    pieces.clear();
    for (const Box& item : list) subtract(item, box, pieces);
    std::swap(list, pieces);
  };
  for (const BoxIndex::Entry& entry : boxes) {
    next.clear();
    fresh.assign(1, *entry.box);
    for (OwnedCell& cell : cells) {
      const auto shared = intersect(cell.box, *entry.box);
      if (!shared) {
        next.push_back(std::move(cell));
        continue;
      }
      without(fresh, *shared);
      pieces.clear();
      subtract(cell.box, *shared, pieces);
      for (const Box& piece : pieces) next.push_back({piece, cell.owners});
      next.push_back({*shared, std::move(cell.owners)});
      next.back().owners.push_back(entry.owner);
    }
    for (const Box& box : fresh) next.push_back({box, {entry.owner}});
    std::swap(cells, next);
    if (cells.size() > max_cells) break;
  }
  for (OwnedCell& cell : cells) {
    std::sort(cell.owners.begin(), cell.owners.end());
    cell.owners.erase(std::unique(cell.owners.begin(), cell.owners.end()), cell.owners.end());
  }
  std::sort(cells.begin(), cells.end(),
            [](const OwnedCell& a, const OwnedCell& b) { return a.box < b.box; });
  return cells;
}

}  // namespace rekindle
