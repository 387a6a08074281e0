#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "recovery/planner/slice_plan.h"

namespace rekindle::planner {

// The part of one tensor that a slice reads. kDirect and kRange: `region` lies in the destination
// entry `entry`. kStaged: `region` is whole tiles (in a group: part of them).
struct Piece {
  Box region;
  TensorIndex tensor = 0;
  std::uint32_t entry = 0;
};

inline constexpr std::uint32_t kNoGroup = std::numeric_limits<std::uint32_t>::max();

struct Slice {
  std::uint64_t bytes = 0;
  SourceMask sources;
  // Index into the pieces of its bucket.
  std::uint32_t first_piece = 0;
  std::uint32_t piece_count = 0;
  std::uint32_t group = kNoGroup;
  std::uint32_t bucket = 0;
  SliceKind kind = SliceKind::kDirect;
};

// Slices that complete their tiles together. `blocks` are boxes of whole tiles, whose bytes
// the slices bring piece by piece. kRange slices are never in a group.
struct Group {
  SliceIndex first = 0;
  SliceIndex count = 0;
  std::vector<Piece> blocks;
};

// The finished plan: flat arrays, expanded slice by slice when asked.
class PlanTable final : public Plan {
 public:
  SliceIndex slice_count() const override { return static_cast<SliceIndex>(slices.size()); }
  std::uint64_t slice_bytes(SliceIndex slice) const override { return slices[slice].bytes; }
  SliceKind kind(SliceIndex slice) const override { return slices[slice].kind; }
  SourceMask candidates(SliceIndex slice) const override { return slices[slice].sources; }
  std::uint32_t bucket(SliceIndex slice) const override { return slices[slice].bucket; }
  std::uint32_t bucket_count() const override { return buckets; }
  void expand(SliceIndex slice, SourceIndex source, Expansion& out) const override {
    expand_from(slice, *sources[source], out);
  }
  bool covered_by(SliceIndex slice, const Layout& source, bool proves_parts) const override;
  void expand_from(SliceIndex slice, const Layout& source, Expansion& out) const override;
  void tiles_read(SliceIndex slice, std::vector<TileIndex>& out) const override;
  void tiles(SliceIndex slice, std::vector<TileWork>& out) const override;
  SliceIndex group_first(SliceIndex slice) const override;
  SliceIndex group_size(SliceIndex slice) const override;
  std::uint64_t wire_bytes() const override { return total_wire_bytes; }
  std::uint64_t wanted_bytes() const override { return total_wanted_bytes; }
  std::span<const MissingBox> missing() const override { return missing_boxes; }
  std::uint64_t memory_bytes() const override;

  // Filled by the builder.
  const Checkpoint* checkpoint = nullptr;
  const Layout* destination = nullptr;
  std::vector<const Layout*> sources;
  PlanOptions options;
  std::vector<Slice> slices;
  // One vector per bucket, so that no large array has to grow.
  std::vector<std::vector<Piece>> pieces;
  std::vector<Group> groups;
  std::vector<MissingBox> missing_boxes;
  std::uint32_t buckets = 0;
  std::uint64_t total_wire_bytes = 0;
  std::uint64_t total_wanted_bytes = 0;

 private:
  std::span<const Piece> pieces_of(SliceIndex slice) const;
  std::span<const Piece> blocks_of(SliceIndex slice) const;
  bool completes_tiles(SliceIndex slice) const;
  bool proves(std::span<const LayoutEntry> entries, const Piece& piece) const;
  void expand_direct(SliceIndex slice, const Layout& source, Expansion& out) const;
  void expand_staged(SliceIndex slice, const Layout& source, Expansion& out) const;
  void range_tiles(SliceIndex slice, std::vector<TileWork>& out) const;
};

}  // namespace rekindle::planner
