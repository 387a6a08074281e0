#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "recovery/planner/assembler.h"
#include "recovery/planner/holders.h"
#include "recovery/planner/plan_table.h"

namespace rekindle::planner {

// Makes the plan, tensor by tensor: which tiles are wanted, whole or in part; who holds them; how
// they are cut into slices. docs/planner.md describes the steps.
class Builder {
 public:
  Builder(const PlanRequest& request, PlanTable& plan);
  void run();

 private:
  // A destination entry that shares elements with a tile.
  struct Touch {
    std::uint64_t tile = 0;  // local to the tensor
    std::uint32_t entry = 0;
    Box box;  // of the whole tile
    bool whole = false;
  };
  // Consecutive tiles along the last dimension that are planned in the same way. `touches` lists
  // them (several times where several entries share a tile).
  struct Run {
    SliceKind kind = SliceKind::kDirect;
    std::uint64_t first = 0;
    std::uint64_t last = 0;  // past the end
    Box block;               // whole tiles
    std::span<const Touch> touches;
    bool shared = false;  // one tile, several entries
  };

  void plan_tensor(TensorIndex tensor);
  void collect_touches(std::uint32_t first_entry, std::uint32_t last_entry);
  bool reads_parts_alone() const;
  SliceKind kind_of(std::span<const Touch> touches_of_one_tile, bool parts_alone) const;
  void plan_run(const Run& run);
  void plan_covered(const Run& run, SourceMask sources);
  void plan_assembled(const Run& run);
  void plan_each_tile(const Run& run);
  void plan_chunks(const Run& run, SourceMask sources, std::uint64_t chunk_bytes);
  Run sub_run(const Run& run, std::uint64_t first, std::uint64_t last) const;
  // What has to arrive for `run`: whole tiles, or for kRange the wanted parts.
  void regions_of(const Run& run, std::vector<Piece>& out) const;
  // Sources that hold all of it. Clears `uniform` when others hold some of it.
  SourceMask sources_of(const Run& run, bool& uniform);
  void add_missing(const Box& box);
  const Box& entry_box(std::uint32_t entry) const;

  const PlanRequest& request_;
  PlanTable& plan_;
  const PlanOptions& options_;  // the plan's
  Holders holders_;
  Assembler assembler_;

  // The tensor at hand.
  TensorIndex tensor_ = 0;
  const TileGrid* grid_ = nullptr;
  std::uint64_t element_bytes_ = 0;
  std::vector<Touch> touches_;
  std::vector<std::uint64_t> scratch_tiles_;
  std::vector<Piece> scratch_pieces_;
  std::vector<Piece> scratch_regions_;
};

// Joins neighbouring boxes of one tensor, in place.
void coalesce(std::vector<MissingBox>& boxes);

}  // namespace rekindle::planner
