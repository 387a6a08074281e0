#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "recovery/planner/slice_plan.h"

namespace rekindle::planner {

// Finds the sources that hold a box. Sources with the same layout (and proofs) form one class, so
// that most of the work is per layout and not per source. Missing tiles of a source are handled
// tile by tile.
class Holders {
 public:
  explicit Holders(std::span<const SourceView> sources);

  // Selects `tensor`; [first_tile, last_tile) are its tiles.
  void select(TensorIndex tensor, TileIndex first_tile, TileIndex last_tile,
              std::uint64_t element_bytes);
  // False when no box of any source shares an element with `box`.
  bool any_overlap(const Box& box) const;
  // Sources whose boxes contain all of `box` and that hold the tiles [first, last), local to the
  // tensor. Clears `uniform` when another source holds a part of that.
  SourceMask covering(const Box& box, std::uint64_t first, std::uint64_t last, bool& uniform) const;

  // A tile of the tensor, by its local index.
  struct Tile {
    std::uint64_t local = 0;
    Box box;
  };
  // Sources that can prove `part` of the tile: they hold all of the tile, or keep the proof of a
  // part that contains it. Clears `uniform` when another source can prove a part of that.
  SourceMask proving(const Box& part, const Tile& tile, bool& uniform) const;

  // Cuts `box` into cells that at least one source covers, and cells that no source covers. Only
  // sources that hold all of the tiles [first, last) count.
  struct Cell {
    Box box;
    SourceMask sources;
  };
  void decompose(const Box& box, std::uint64_t first, std::uint64_t last, std::vector<Cell>& cells,
                 std::vector<Box>& leftover) const;
  // Cuts a part of a tile into cells that at least one source can prove. False: that is not
  // possible.
  bool decompose_provable(const Box& part, const Tile& tile, std::vector<Cell>& cells) const;

 private:
  struct Class {
    const Layout* layout = nullptr;
    bool proves_parts = false;
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
  // What the class can prove of the tile: boxes of its entries, or (one) all of it.
  template <typename Visit>
  void for_each_provable(const Class& members, const Tile& tile, const Visit& visit) const;

  std::vector<Class> classes_;
  TileIndex first_tile_ = 0;
  std::uint64_t element_bytes_ = 0;
};

enum class Cover { kNone, kPart, kAll };
// The elements of `box` that lie in `entries`, which do not overlap each other.
Cover entries_cover(std::span<const LayoutEntry> entries, const Box& box);

}  // namespace rekindle::planner
