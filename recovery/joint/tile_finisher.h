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

// Computes the leaves of the shared tiles that one host finishes, from the pieces of all hosts that
// hold a part of them. Each host sends the pieces of its tiles in ascending order. Sans I/O.
class TileFinisher {
 public:
  // `tiles`: the shared tiles of this host, ascending.
  TileFinisher(ModelVersion id, std::shared_ptr<const JointPlan> plan,
               std::vector<TileIndex> tiles);

  // The pieces of all of the host's cells of a tile, joined in the order of the plan. Repeated
  // pieces, and all pieces of a finished tile, are ignored. kInvalid: the host has no part in such
  // a tile, or, with a line that names tensor and ranks, its bytes differ from those of another
  // host. kCorrupt: a wrong length.
  Result<void> add(std::uint32_t host, TileIndex tile, std::string_view pieces);

  // Leaves that became known since the last call, ascending within one call.
  std::vector<std::pair<TileIndex, Digest>> take_leaves();
  bool complete() const { return open_.empty(); }

  // Pieces of this tile may come now. The pieces of incomplete tiles take memory, so a host that is
  // ahead of the others waits.
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
  Result<Digest> leaf(TileIndex tile, const Tile& state) const;

  const ModelVersion id_;
  const std::shared_ptr<const JointPlan> plan_;
  // The tiles whose leaves are not known.
  std::map<TileIndex, Tile> open_;
  std::vector<TileIndex> tiles_;
  std::vector<std::pair<TileIndex, Digest>> leaves_;
  std::uint64_t bytes_ = 0;
};

}  // namespace rekindle::joint
