#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/box_index.h"
#include "src/tensor/joint_declaration.h"
#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"
#include "src/tensor/tile.h"

// The plan of a joint publication (docs/internals/joint-publication.md): which rank writes which
// elements, and which host digests which tiles. Every agent computes it from the declarations of
// all ranks, and all get the same. Pure: no clock, no randomness, no I/O.
namespace rekindle {

// Moves, so that the boxes stay where they are; never copied.
class JointPlan {
 public:
  // A part of a shared tile that lies in one written box of each of its hosts.
  struct Cell {
    Box box;
    std::vector<std::uint32_t> hosts;  // ascending
    bool operator==(const Cell&) const = default;
  };
  // What one host does with the tiles of its boxes; each list ascends.
  struct HostTiles {
    std::vector<TileIndex> whole;     // not shared: the host computes the leaf alone
    std::vector<TileIndex> shared;    // the host makes pieces of its cells
    std::vector<TileIndex> finished;  // the shared ones of which it is the finisher
  };

  // `hosts` are in roster order. kInvalid, with a line that names tensor and ranks: two ranks
  // disagree about a tensor, a rank comes twice, boxes of one rank overlap, an element has no rank,
  // there is no tensor, or there are too many boxes.
  static Result<JointPlan> create(std::vector<JointHost> hosts);

  JointPlan(JointPlan&&) = default;
  JointPlan& operator=(JointPlan&&) = default;

  const TensorSet& tensors() const { return tensors_; }
  const TileMap& tiles() const { return tiles_; }

  // Hosts are numbered in the order of the roster.
  std::uint32_t host_count() const { return static_cast<std::uint32_t>(hosts_.size()); }
  const std::string& host_name(std::uint32_t host) const { return hosts_[host].name; }
  std::span<const std::uint32_t> ranks(std::uint32_t host) const { return hosts_[host].ranks; }

  // What the rank writes, sorted by tensor and box. The ranks of a host write each of its elements
  // exactly once. The first rank of a host that declared an empty tensor writes its empty box. An
  // unknown rank writes nothing.
  std::span<const TensorBox> writes(std::uint32_t rank) const;
  // All that the ranks of a host write, in the order of a Layout.
  std::vector<TensorBox> boxes(std::uint32_t host) const;

  // Whether some host holds elements of the tile but not all of it. Like the next three, each call
  // computes this from the boxes near the tile.
  bool is_shared(TileIndex tile) const;
  // The first host that holds the tile's first element.
  std::uint32_t finisher(TileIndex tile) const;
  // The tile cut at the borders of all boxes in it, sorted by box.
  std::vector<Cell> cells(TileIndex tile) const;
  // The cost grows with the number of the host's tiles.
  HostTiles tiles_of(std::uint32_t host) const;

  // The ranks that declared an element of the box, ascending.
  std::vector<std::uint32_t> ranks_with(TensorIndex tensor, const Box& box) const;

 private:
  struct Host {
    std::string name;
    std::vector<std::uint32_t> ranks;
  };
  struct Rank {
    std::uint32_t number = 0;
    std::uint32_t host = 0;
    std::vector<TensorBox> writes;
  };
  // A declared box that another rank of the host writes, in whole or in part.
  struct Yielded {
    Box box;
    std::uint32_t rank = 0;
  };
  // Where a tile lies, and the boxes near it.
  struct Place {
    TensorIndex tensor = 0;
    Box box;
    std::span<const BoxIndex::Entry> near;
  };
  class Planner;

  JointPlan(TensorSet tensors, TileMap tiles)
      : tensors_(std::move(tensors)), tiles_(std::move(tiles)) {}

  Place place_of(TileIndex tile) const;
  std::uint32_t host_of(const BoxIndex::Entry& entry) const { return ranks_[entry.owner].host; }

  TensorSet tensors_;
  TileMap tiles_;
  std::vector<Host> hosts_;
  std::vector<Rank> ranks_;  // in the order of the roster
  std::map<std::uint32_t, std::uint32_t> rank_by_number_;
  // Per tensor: the boxes in `ranks_` that are not empty. An owner is an index into `ranks_`.
  std::vector<BoxIndex> written_;
  std::map<TensorIndex, std::vector<Yielded>> yielded_;
};

// For messages: "rank 3", "ranks 3 and 11", "ranks 3, 11, 12 and 253 more". `ranks` is not empty.
std::string name_ranks(std::span<const std::uint32_t> ranks);

}  // namespace rekindle
