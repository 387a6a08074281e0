#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"
#include "src/tensor/tile.h"

// The plan of a joint publication (docs/internals/joint-publication.md): who writes which elements,
// and who digests which tiles. Every agent computes it from the declarations of all ranks, and all
// get the same. Pure: no clock, no randomness, no I/O.
namespace rekindle {

// What one rank has of one tensor.
struct DeclaredTensor {
  TensorInfo info;  // shape of the whole tensor
  std::vector<Box> boxes;
  bool operator==(const DeclaredTensor&) const = default;
};

struct Declaration {
  std::uint32_t rank = 0;
  std::vector<DeclaredTensor> tensors;
  bool operator==(const Declaration&) const = default;
};

// The ranks of one agent.
struct JointHost {
  std::string name;
  std::vector<Declaration> ranks;
  bool operator==(const JointHost&) const = default;
};

inline constexpr std::size_t kMaxJointBoxes = 4'000'000;
inline constexpr std::size_t kMaxJointRanks = 1 << 20;
inline constexpr std::size_t kMaxHostNameBytes = 255;

// Canonical bytes of a host's declarations: ranks ascend, so do the tensors of a rank by name, and
// the boxes of a tensor.
std::string serialize_declarations(const JointHost& host);
// kInvalid: not in canonical form, a name that TensorSet refuses, a box outside of its tensor, or
// too many boxes.
Result<JointHost> parse_declarations(std::string_view canonical);

class JointPlan {
 public:
  // A part of a shared tile that lies in one written box of each of its hosts.
  struct Cell {
    Box box;
    std::vector<std::size_t> hosts;  // ascending
    bool operator==(const Cell&) const = default;
  };
  // What one host does with the tiles that it touches; each list ascends.
  struct HostTiles {
    std::vector<TileIndex> whole;     // not shared: the host computes the leaf alone
    std::vector<TileIndex> shared;    // the host makes pieces of its cells
    std::vector<TileIndex> finished;  // shared ones whose finisher it is
  };

  // `hosts` are in roster order. kInvalid, with a line that names tensor and ranks: two ranks
  // disagree about a tensor, a rank comes twice, boxes of one rank overlap, an element has no rank,
  // there is no tensor, or there are too many boxes.
  static Result<JointPlan> create(std::vector<JointHost> hosts);

  const TensorSet& tensors() const { return tensors_; }
  const TileMap& tiles() const { return tiles_; }

  std::size_t host_count() const { return hosts_.size(); }
  const std::string& host_name(std::size_t host) const { return hosts_[host].name; }
  // In the order of the roster.
  std::span<const std::uint32_t> ranks(std::size_t host) const { return hosts_[host].ranks; }

  // What the rank writes, sorted by tensor and box. The ranks of a host write each of its elements
  // exactly once. A rank that is unknown writes nothing.
  std::span<const TensorBox> writes(std::uint32_t rank) const;
  // All that the ranks of a host write, in the order of a Layout.
  std::vector<TensorBox> boxes(std::size_t host) const;

  // Whether some host holds elements of the tile but not all of it. This and the next three are
  // computed by each call, from the boxes near the tile.
  bool is_shared(TileIndex tile) const;
  // The first host that holds the tile's first element.
  std::size_t finisher(TileIndex tile) const;
  // The tile cut at the borders of all boxes in it, in the order of their boxes.
  std::vector<Cell> cells(TileIndex tile) const;
  // Costs a look at every tile of the host.
  HostTiles tiles_of(std::size_t host) const;

  // The ranks that declared an element of the box, ascending.
  std::vector<std::uint32_t> ranks_with(TensorIndex tensor, const Box& box) const;

 private:
  friend class JointPlanner;

  struct Host {
    std::string name;
    std::vector<std::uint32_t> ranks;
  };
  // A written box of a tensor, and which host has it.
  struct Held {
    std::uint32_t host = 0;
    std::uint32_t rank = 0;  // index into writes_
    std::uint32_t write = 0;
  };
  // All written boxes of a tensor, sorted by their offset in dimension `axis`.
  struct HeldTensor {
    std::size_t axis = 0;
    std::vector<Held> held;
    // Per element of `held`: the largest end in that dimension up to it.
    std::vector<std::uint64_t> max_end;
  };
  // A declared box that another rank of the host writes, in whole or in part.
  struct Yielded {
    Box box;
    std::uint32_t rank = 0;
  };

  JointPlan(TensorSet tensors, TileMap tiles)
      : tensors_(std::move(tensors)), tiles_(std::move(tiles)) {}
  const Box& box_of(const Held& held) const { return writes_[held.rank][held.write].box; }

  TensorSet tensors_;
  TileMap tiles_;
  std::vector<Host> hosts_;
  std::map<std::uint32_t, std::uint32_t> rank_index_;
  std::vector<std::vector<TensorBox>> writes_;
  std::vector<HeldTensor> held_;  // per tensor
  std::map<TensorIndex, std::vector<Yielded>> yielded_;
};

// For messages: "rank 3", "ranks 3 and 11", "ranks 3, 11, 12 and 253 more". `ranks` is not empty.
std::string name_ranks(std::span<const std::uint32_t> ranks);

}  // namespace rekindle
