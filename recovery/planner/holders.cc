#include "recovery/planner/holders.h"

#include <algorithm>
#include <optional>

#include "src/tensor/held_tile.h"

namespace rekindle::planner {

namespace {

// Entries are sorted by their offset, so the first one behind the box ends the search.
bool starts_behind(const LayoutEntry& entry, const Box& box) {
  return box.rank() > 0 && entry.box.offset[0] >= box.offset[0] + box.extent[0];
}

bool overlaps(const Box& a, const Box& b) {
  for (std::size_t i = 0; i < a.rank(); ++i) {
    if (a.offset[i] >= b.offset[i] + b.extent[i] || b.offset[i] >= a.offset[i] + a.extent[i]) {
      return false;
    }
  }
  return true;
}

enum class TensorHeld { kNone, kSome, kAll };

TensorHeld tensor_held(const TileSet& held, TileIndex first, TileIndex last) {
  const bool head = held.test(first);
  for (TileIndex tile = first + 1; tile < last; ++tile) {
    if (held.test(tile) != head) return TensorHeld::kSome;
  }
  return head ? TensorHeld::kAll : TensorHeld::kNone;
}

}  // namespace

Cover entries_cover(std::span<const LayoutEntry> entries, const Box& box) {
  std::uint64_t covered = 0;
  const std::uint64_t wanted = box.elements();
  for (const LayoutEntry& entry : entries) {
    if (starts_behind(entry, box)) break;
    covered += shared_elements(entry.box, box);
    if (covered >= wanted) return Cover::kAll;
  }
  return covered > 0 ? Cover::kPart : Cover::kNone;
}

Holders::Holders(std::span<const SourceView> sources) {
  for (SourceIndex source = 0; source < sources.size(); ++source) {
    const SourceView& view = sources[source];
    auto found = std::find_if(classes_.begin(), classes_.end(), [&](const Class& other) {
      return other.proves_parts == view.proves_parts &&
             (other.layout == view.layout || other.layout->digest() == view.layout->digest());
    });
    if (found == classes_.end()) {
      found = classes_.emplace(classes_.end());
      found->layout = view.layout;
      found->proves_parts = view.proves_parts;
    }
    if (view.held == nullptr) {
      found->complete.set(source);
    } else {
      found->sparse.emplace_back(source, view.held);
    }
  }
}

void Holders::select(TensorIndex tensor, TileIndex first_tile, TileIndex last_tile,
                     std::uint64_t element_bytes) {
  first_tile_ = first_tile;
  element_bytes_ = element_bytes;
  for (Class& members : classes_) {
    members.entries = members.layout->entries_of(tensor);
    members.members = members.complete;
    members.by_tile.clear();
    if (members.entries.empty()) continue;
    for (const auto& [source, held] : members.sparse) {
      switch (tensor_held(*held, first_tile, last_tile)) {
        case TensorHeld::kAll:
          members.members.set(source);
          break;
        case TensorHeld::kSome:
          members.by_tile.emplace_back(source, held);
          break;
        case TensorHeld::kNone:
          break;
      }
    }
    if (members.members.empty() && members.by_tile.empty()) members.entries = {};
  }
}

bool Holders::any_overlap(const Box& box) const {
  return std::any_of(classes_.begin(), classes_.end(), [&](const Class& members) {
    return std::any_of(members.entries.begin(), members.entries.end(),
                       [&](const LayoutEntry& entry) { return overlaps(entry.box, box); });
  });
}

SourceMask Holders::holding(const Class& members, std::uint64_t first, std::uint64_t last,
                            bool& uniform) const {
  SourceMask mask = members.members;
  for (const auto& [source, held] : members.by_tile) {
    std::uint64_t count = 0;
    for (std::uint64_t tile = first; tile < last; ++tile) {
      count += held->test(first_tile_ + static_cast<TileIndex>(tile));
    }
    if (count == last - first) {
      mask.set(source);
    } else if (count > 0) {
      uniform = false;
    }
  }
  return mask;
}

SourceMask Holders::covering(const Box& box, std::uint64_t first, std::uint64_t last,
                             bool& uniform) const {
  SourceMask mask;
  for (const Class& members : classes_) {
    if (members.entries.empty()) continue;
    const Cover cover = entries_cover(members.entries, box);
    if (cover == Cover::kAll) mask = mask | holding(members, first, last, uniform);
    if (cover == Cover::kPart) uniform = false;
  }
  return mask;
}

// `visit` returns false to end the walk.
template <typename Visit>
void Holders::for_each_provable(const Class& members, const Tile& tile, const Visit& visit) const {
  if (members.entries.empty()) return;
  if (entries_cover(members.entries, tile.box) == Cover::kAll) {
    visit(tile.box);
    return;
  }
  if (!members.proves_parts) return;
  for (const KeptProof& kept : kept_proofs(members.entries, tile.box, element_bytes_)) {
    if (!visit(kept.part)) return;
  }
}

SourceMask Holders::proving(const Box& part, const Tile& tile, bool& uniform) const {
  SourceMask mask;
  for (const Class& members : classes_) {
    if (!std::ranges::any_of(members.entries,
                             [&](const LayoutEntry& entry) { return overlaps(entry.box, part); })) {
      continue;
    }
    for_each_provable(members, tile, [&](const Box& provable) {
      if (contains(provable, part)) {
        mask = mask | holding(members, tile.local, tile.local + 1, uniform);
        return false;
      }
      if (overlaps(provable, part)) uniform = false;
      return true;
    });
  }
  return mask;
}

bool Holders::decompose_provable(const Box& part, const Tile& tile,
                                 std::vector<Cell>& cells) const {
  // An output of proving() and holding() that is not used here.
  bool uniform = true;
  std::vector<Box> open{part};
  while (!open.empty()) {
    const Box piece = open.back();
    open.pop_back();
    std::optional<Box> best;
    for (const Class& members : classes_) {
      if (holding(members, tile.local, tile.local + 1, uniform).empty()) continue;
      for_each_provable(members, tile, [&](const Box& provable) {
        const auto shared = intersect(provable, piece);
        if (shared && (!best || shared->elements() > best->elements())) best = shared;
        return true;
      });
    }
    if (!best) return false;
    cells.push_back({*best, proving(*best, tile, uniform)});
    subtract(piece, *best, open);
  }
  std::ranges::sort(cells, {}, [](const Cell& cell) { return cell.box.offset; });
  return true;
}

void Holders::decompose(const Box& box, std::uint64_t first, std::uint64_t last,
                        std::vector<Cell>& cells, std::vector<Box>& leftover) const {
  // An output of covering() and holding() that is not used here.
  bool uniform = true;
  std::vector<Box> open{box};
  while (!open.empty()) {
    const Box piece = open.back();
    open.pop_back();
    const SourceMask sources = covering(piece, first, last, uniform);
    if (!sources.empty()) {
      cells.push_back({piece, sources});
      continue;
    }
    const LayoutEntry* best = nullptr;
    std::uint64_t most = 0;
    for (const Class& members : classes_) {
      if (members.entries.empty() || holding(members, first, last, uniform).empty()) continue;
      for (const LayoutEntry& entry : members.entries) {
        if (starts_behind(entry, piece)) break;
        const std::uint64_t shared = shared_elements(entry.box, piece);
        if (shared <= most) continue;
        most = shared;
        best = &entry;
      }
    }
    if (best == nullptr) {
      leftover.push_back(piece);
      continue;
    }
    const Box cell = *intersect(best->box, piece);
    cells.push_back({cell, covering(cell, first, last, uniform)});
    subtract(piece, cell, open);
  }
  std::sort(cells.begin(), cells.end(),
            [](const Cell& a, const Cell& b) { return a.box.offset < b.box.offset; });
}

}  // namespace rekindle::planner
