#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "recovery/planner/plan.h"

namespace rekindle::planner {

// Who holds what. Sources with the same layout are looked at as one class, so that the work is per
// layout and not per source; what single tiles a source lacks is decided per tile.
class Holders {
 public:
  explicit Holders(std::span<const SourceView> sources);

  // Looks at `tensor` from here on; [first_tile, last_tile) are its tiles.
  void select(TensorIndex tensor, TileIndex first_tile, TileIndex last_tile);
  // False when no box of any source shares an element with `box`.
  bool any_overlap(const Box& box) const;
  // Sources whose boxes contain all of `box` and that hold the tiles [first, last), local to the
  // tensor. Clears `uniform` when another source holds a part of that.
  SourceMask covering(const Box& box, std::uint64_t first, std::uint64_t last, bool& uniform) const;

  // Cuts `box` into cells that at least one source covers, and what nobody holds. Only sources that
  // hold all of the tiles [first, last) count.
  struct Cell {
    Box box;
    SourceMask sources;
  };
  void decompose(const Box& box, std::uint64_t first, std::uint64_t last, std::vector<Cell>& cells,
                 std::vector<Box>& leftover) const;

 private:
  struct Class {
    const Layout* layout = nullptr;
    SourceMask complete;                                         // hold all that the layout covers
    std::vector<std::pair<SourceIndex, const TileSet*>> sparse;  // hold some tiles of it
    // Of the selected tensor:
    std::span<const LayoutEntry> entries;
    SourceMask members;                                           // complete for this tensor
    std::vector<std::pair<SourceIndex, const TileSet*>> by_tile;  // to be asked tile by tile
  };

  SourceMask holding(const Class& members, std::uint64_t first, std::uint64_t last,
                     bool& uniform) const;

  std::vector<Class> classes_;
  TileIndex first_tile_ = 0;
};

enum class Cover { kNone, kPart, kAll };
// How much of `box` lies in `entries`, which do not overlap each other.
Cover entries_cover(std::span<const LayoutEntry> entries, const Box& box);

}  // namespace rekindle::planner
