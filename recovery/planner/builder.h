#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "recovery/planner/assembler.h"
#include "recovery/planner/holders.h"
#include "recovery/planner/plan_table.h"

namespace rekindle::planner {

// Makes the plan, tensor by tensor: finds the wanted tiles, whole or in part, and their holders,
// and cuts them into slices. docs/internals/planner.md describes the steps.
class Builder {
 public:
  Builder(const PlanRequest& request, PlanTable& plan);
  void run();

 private:
  // A destination entry that shares elements with a tile.
  struct Touch {
    // Local to the tensor.
    std::uint64_t tile = 0;
    std::uint32_t entry = 0;
    // Of the whole tile.
    Box box;
    bool whole = false;
  };
  // Consecutive tiles along the last dimension that are planned in the same way. `touches` lists
  // them (several times where several entries share a tile).
  struct Run {
    SliceKind kind = SliceKind::kDirect;
    std::uint64_t first = 0;
    // Past the end.
    std::uint64_t last = 0;
    // Whole tiles.
    Box block;
    std::span<const Touch> touches;
    // One tile, several entries.
    bool shared = false;
  };

  void plan_tensor(TensorIndex tensor);
  void collect_touches(std::uint32_t first_entry, std::uint32_t last_entry);
  bool reads_parts_alone() const;
  bool is_small() const;
  SliceKind kind_of(std::span<const Touch> touches_of_one_tile, bool parts_alone) const;
  void plan_run(const Run& run);
  void plan_covered(const Run& run, SourceMask sources);
  void plan_assembled(const Run& run);
  struct ProvablePart {
    std::uint32_t entry = 0;
    Holders::Cell cell;
  };
  bool find_provable_parts(const Run& tile, std::vector<ProvablePart>& parts) const;
  bool plan_provable_parts(const Run& run);
  void plan_each_tile(const Run& run);
  void plan_chunks(const Run& run, SourceMask sources, std::uint64_t chunk_bytes);
  Run sub_run(const Run& run, std::uint64_t first, std::uint64_t last) const;
  // The bytes that have to arrive for `run`: whole tiles, or for kRange the wanted parts.
  void regions_of(const Run& run, std::vector<Piece>& out) const;
  // Sources that hold all of it; kRange: that can prove all that is wanted of it. Clears `uniform`
  // when others hold, or can prove, some of it.
  SourceMask sources_of(const Run& run, bool& uniform);
  void add_missing(const Box& box);
  const Box& entry_box(std::uint32_t entry) const;

  const PlanRequest& request_;
  PlanTable& plan_;
  // The plan's.
  const PlanOptions& options_;
  Holders holders_;
  Assembler assembler_;

  // The tensor that is being planned.
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
