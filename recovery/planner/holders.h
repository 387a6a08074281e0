#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "recovery/planner/slice_plan.h"

namespace rekindle::planner {

// Finds the sources that hold a box. Sources with the same layout form one class, so that most of
// the work is per layout and not per source. Missing tiles of a source are handled tile by tile.
class Holders {
 public:
  explicit Holders(std::span<const SourceView> sources);

  // Selects `tensor`; [first_tile, last_tile) are its tiles.
  void select(TensorIndex tensor, TileIndex first_tile, TileIndex last_tile);
  // False when no box of any source shares an element with `box`.
  bool any_overlap(const Box& box) const;
  // Sources whose boxes contain all of `box` and that hold the tiles [first, last), local to the
  // tensor. Clears `uniform` when another source holds a part of that.
  SourceMask covering(const Box& box, std::uint64_t first, std::uint64_t last, bool& uniform) const;

  // Cuts `box` into cells that at least one source covers, and cells that no source covers. Only
  // sources that hold all of the tiles [first, last) count.
  struct Cell {
    Box box;
    SourceMask sources;
  };
  void decompose(const Box& box, std::uint64_t first, std::uint64_t last, std::vector<Cell>& cells,
                 std::vector<Box>& leftover) const;

 private:
  struct Class {
    const Layout* layout = nullptr;
    // Sources that hold all that the layout covers.
    SourceMask complete;
    // Sources that hold some tiles of it.
    std::vector<std::pair<SourceIndex, const TileSet*>> sparse;
    // Of the selected tensor:
    std::span<const LayoutEntry> entries;
    // Sources that hold all of this tensor that the layout covers.
    SourceMask members;
    // Sources that are handled tile by tile.
    std::vector<std::pair<SourceIndex, const TileSet*>> by_tile;
  };

  SourceMask holding(const Class& members, std::uint64_t first, std::uint64_t last,
                     bool& uniform) const;

  std::vector<Class> classes_;
  TileIndex first_tile_ = 0;
};

enum class Cover { kNone, kPart, kAll };
// The elements of `box` that lie in `entries`, which do not overlap each other.
Cover entries_cover(std::span<const LayoutEntry> entries, const Box& box);

}  // namespace rekindle::planner
