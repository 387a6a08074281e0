#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/tensor/joint_plan.h"
#include "src/tensor/tile_piece.h"

namespace rekindle::joint {

// Gathers the shared tiles that one host finishes: the pieces of all hosts that hold a part of
// them. Each host sends the pieces of its tiles in ascending order. Sans I/O.
class TileFinisher {
 public:
  // A tile with all its pieces. Their digest takes long, so it is not made here.
  struct Gathered {
    TileIndex tile = 0;
    std::vector<std::pair<Box, std::string>> cells;
    std::uint64_t bytes = 0;  // of the pieces
  };

  // `tiles`: the shared tiles of this host, ascending.
  TileFinisher(ModelVersion id, std::shared_ptr<const JointPlan> plan,
               std::vector<TileIndex> tiles);

  // The pieces of all of the host's cells of a tile, joined in the order of the plan. Repeated
  // pieces, and all pieces of a gathered tile, are ignored. kInvalid: the host has no part in such
  // a tile, or, with a line that names tensor and ranks, its bytes differ from those of another
  // host. kCorrupt: a wrong length.
  Result<void> add(std::uint32_t host, TileIndex tile, std::string_view pieces);

  // The tiles that were gathered since the last call. The caller computes leaf() of each, on any
  // thread, and then reports it with digested().
  std::vector<Gathered> take_gathered();
  bool has_gathered() const { return !gathered_.empty(); }
  Result<Digest> leaf(const Gathered& gathered) const;
  void digested(const Gathered& gathered);
  // Every tile is digested.
  bool complete() const { return open_.empty() && undigested_ == 0; }

  // Pieces of this tile may come now. The pieces of tiles without a leaf take memory, so a host
  // that is ahead of the others waits.
  bool has_room_for(TileIndex tile) const;

 private:
  struct Cell {
    Box box;
    std::vector<std::uint32_t> hosts;
    std::string piece;  // empty until the first host has sent it
    std::uint32_t from = 0;
  };
  struct Tile {
    std::vector<Cell> cells;
    std::vector<std::uint32_t> missing;  // hosts
    std::uint64_t bytes = 0;
  };
  Tile& begin(TileIndex tile, Tile& state) const;

  const ModelVersion id_;
  const std::shared_ptr<const JointPlan> plan_;
  // The tiles with missing pieces.
  std::map<TileIndex, Tile> open_;
  const std::vector<TileIndex> tiles_;
  std::vector<Gathered> gathered_;
  // Gathered tiles without a leaf, also those that were taken.
  std::size_t undigested_ = 0;
  // Of the pieces of all tiles without a leaf.
  std::uint64_t bytes_ = 0;
};

}  // namespace rekindle::joint
