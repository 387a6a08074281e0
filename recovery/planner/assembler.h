#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "recovery/planner/plan_table.h"

namespace rekindle::planner {

// Packs pieces into slices and slices into buckets. Within a bucket one slice per (kind, sources)
// is open at a time, so that small tensors between large ones share slices; a bucket's slices come
// in the order of their first piece.
class Assembler {
 public:
  Assembler(PlanTable& plan, std::uint64_t slice_bytes, std::uint64_t bucket_bytes)
      : plan_(plan), slice_bytes_(slice_bytes), bucket_bytes_(bucket_bytes) {}

  // Pieces that must share a slice; together at most slice_bytes.
  void add(SliceKind kind, SourceMask sources, std::span<const Piece> pieces, std::uint64_t bytes);

  struct Part {
    Piece piece;
    SourceMask sources;
  };
  // Slices that complete `blocks` together; parts are cut to slice_bytes here. Small groups with
  // the same sources share their slices: a thousand tensors of a few KiB, each of which several
  // sources hold in parts, become one group with a slice per source.
  void add_group(SliceKind kind, std::span<const Part> parts, std::vector<Piece> blocks,
                 std::uint64_t element_bytes);
  void finish() { close_bucket(); }

 private:
  struct Open {
    SliceKind kind;
    SourceMask sources;
    std::uint64_t bytes = 0;
    std::vector<Piece> pieces;
    // Index into groups_; -1: none.
    std::int64_t group = -1;
    bool full = false;
  };

  struct OpenGroup {
    SliceKind kind;
    // The distinct masks of its slices, ascending.
    std::vector<SourceMask> sources;
    std::uint64_t bytes = 0;
    // Index into groups_.
    std::size_t group = 0;
    // Index into slices_; one slice for each mask.
    std::size_t first_slice = 0;
  };

  void make_room(std::uint64_t bytes);
  void add_large_group(SliceKind kind, std::span<const Part> parts, std::vector<Piece> blocks,
                       std::uint64_t element_bytes);
  OpenGroup& open_group(SliceKind kind, std::vector<SourceMask> sources, std::uint64_t bytes);
  void close_bucket();

  PlanTable& plan_;
  const std::uint64_t slice_bytes_;
  const std::uint64_t bucket_bytes_;
  // Of the bucket that is being filled, in the order in which they were begun.
  std::vector<Open> slices_;
  std::vector<Group> groups_;
  std::vector<OpenGroup> open_groups_;
  std::uint64_t bucket_used_ = 0;
};

// The union of both, when `b` follows `a` along one dimension and they are equal in all others.
std::optional<Box> joined(const Box& a, const Box& b);

// Cuts `box` into boxes of at most `max_bytes` and nearly equal size, along its outermost dimension
// first, so that each stays contiguous where the box is.
void cut_box(const Box& box, std::uint64_t element_bytes, std::uint64_t max_bytes,
             std::vector<Box>& out);

}  // namespace rekindle::planner
