#include "recovery/planner/plan_table.h"

#include <algorithm>
#include <tuple>

#include "recovery/planner/holders.h"
#include "src/base/units.h"
#include "src/tensor/held_tile.h"

namespace rekindle::planner {

namespace {

constexpr std::uint64_t kStagingAlignBytes = 16;

std::uint64_t element_bytes_of(const Checkpoint& checkpoint, TensorIndex tensor) {
  return dtype_size_bytes(checkpoint.tensors[tensor].dtype);
}

// Calls visit(tile box, local tile, offset in staging) for each tile of the blocks of a staged
// slice; returns the bytes of staging that they take.
template <typename Visit>
std::uint64_t for_each_staged_tile(const Checkpoint& checkpoint, std::span<const Piece> blocks,
                                   const Visit& visit) {
  std::uint64_t offset = 0;
  std::vector<std::uint64_t> locals;
  for (const Piece& block : blocks) {
    const TileGrid& grid = checkpoint.tiles.grid(block.tensor);
    const std::uint64_t element_bytes = element_bytes_of(checkpoint, block.tensor);
    locals.clear();
    grid.tiles_of(block.region, locals);
    for (const std::uint64_t local : locals) {
      const Box box = grid.tile_box(local);
      visit(block, box, local, offset);
      offset = round_up(offset + box.elements() * element_bytes, kStagingAlignBytes);
    }
  }
  return offset;
}

// Appends the copies of `region` from one array to another, each at an offset of its own.
void append_copies(const Box& region, const Box& src, std::uint64_t src_offset, const Box& dst,
                   std::uint64_t dst_offset, std::uint64_t element_bytes,
                   std::vector<StridedCopy>& out) {
  const std::size_t before = out.size();
  strided_copies(region, src, dst, element_bytes, out);
  for (std::size_t i = before; i < out.size(); ++i) {
    out[i].src_offset += src_offset;
    out[i].dst_offset += dst_offset;
  }
}

// Pieces are made tensor by tensor.
std::span<const Piece> of_tensor(std::span<const Piece> pieces, TensorIndex tensor) {
  const auto [begin, end] =
      std::equal_range(pieces.begin(), pieces.end(), Piece{{}, tensor, 0},
                       [](const Piece& a, const Piece& b) { return a.tensor < b.tensor; });
  return {begin, end};
}

bool continues(const StridedCopy& a, const StridedCopy& b) {
  return a.count == 1 && b.count == 1 && a.src_offset + a.run_bytes == b.src_offset &&
         a.dst_offset + a.run_bytes == b.dst_offset;
}

// Sorts the reads by their place at the source and joins those that are contiguous at both ends.
void merge_reads(std::vector<PlannedRead>& reads) {
  if (reads.size() < 2) return;
  std::sort(reads.begin(), reads.end(), [](const PlannedRead& a, const PlannedRead& b) {
    return std::tie(a.remote_segment, a.copy.src_offset, a.copy.dst_offset) <
           std::tie(b.remote_segment, b.copy.src_offset, b.copy.dst_offset);
  });
  std::size_t kept = 0;
  for (std::size_t i = 1; i < reads.size(); ++i) {
    PlannedRead& last = reads[kept];
    const PlannedRead& next = reads[i];
    if (last.remote_segment == next.remote_segment && last.local_segment == next.local_segment &&
        continues(last.copy, next.copy)) {
      last.copy.run_bytes += next.copy.run_bytes;
    } else {
      reads[++kept] = next;
    }
  }
  reads.resize(kept + 1);
}

void merge_scatter(std::vector<PlannedScatter>& scatter) {
  if (scatter.size() < 2) return;
  std::size_t kept = 0;
  for (std::size_t i = 1; i < scatter.size(); ++i) {
    PlannedScatter& last = scatter[kept];
    if (last.local_segment == scatter[i].local_segment && continues(last.copy, scatter[i].copy)) {
      last.copy.run_bytes += scatter[i].copy.run_bytes;
    } else {
      scatter[++kept] = scatter[i];
    }
  }
  scatter.resize(kept + 1);
}

}  // namespace

std::span<const Piece> PlanTable::pieces_of(SliceIndex slice) const {
  const Slice& of = slices[slice];
  return std::span(pieces[of.bucket]).subspan(of.first_piece, of.piece_count);
}

std::span<const Piece> PlanTable::blocks_of(SliceIndex slice) const {
  const std::uint32_t group = slices[slice].group;
  return group == kNoGroup ? pieces_of(slice) : std::span<const Piece>(groups[group].blocks);
}

SliceIndex PlanTable::group_first(SliceIndex slice) const {
  return slices[slice].group == kNoGroup ? slice : groups[slices[slice].group].first;
}

SliceIndex PlanTable::group_size(SliceIndex slice) const {
  return slices[slice].group == kNoGroup ? 1 : groups[slices[slice].group].count;
}

bool PlanTable::completes_tiles(SliceIndex slice) const {
  return slice + 1 == group_first(slice) + group_size(slice);
}

void PlanTable::expand_from(SliceIndex slice, const Layout& source, Expansion& out) const {
  out.reads.clear();
  out.scatter.clear();
  out.staging_bytes = 0;
  if (slices[slice].kind == SliceKind::kStaged) {
    expand_staged(slice, source, out);
  } else {
    expand_direct(slice, source, out);
  }
}

void PlanTable::expand_direct(SliceIndex slice, const Layout& source, Expansion& out) const {
  std::vector<StridedCopy> copies;
  for (const Piece& piece : pieces_of(slice)) {
    const LayoutEntry& local = destination->entries()[piece.entry];
    const std::uint64_t element_bytes = element_bytes_of(*checkpoint, piece.tensor);
    for (const LayoutEntry& remote : source.entries_of(piece.tensor)) {
      const auto region = intersect(remote.box, piece.region);
      if (!region) continue;
      copies.clear();
      append_copies(*region, remote.box, remote.offset_bytes, local.box, local.offset_bytes,
                    element_bytes, copies);
      for (const StridedCopy& copy : copies) {
        out.reads.push_back({remote.segment, local.segment, copy});
      }
    }
  }
  merge_reads(out.reads);
}

void PlanTable::expand_staged(SliceIndex slice, const Layout& source, Expansion& out) const {
  const std::span<const Piece> own = pieces_of(slice);
  const bool grouped = slices[slice].group != kNoGroup;
  const bool completes = completes_tiles(slice);
  std::vector<StridedCopy> copies;
  const auto visit = [&](const Piece& block, const Box& tile, std::uint64_t, std::uint64_t at) {
    const std::uint64_t element_bytes = element_bytes_of(*checkpoint, block.tensor);
    // Outside of a group the pieces of a slice are its blocks.
    for (const Piece& piece : grouped ? of_tensor(own, block.tensor) : std::span(&block, 1)) {
      const auto part = intersect(piece.region, tile);
      if (!part) continue;
      for (const LayoutEntry& remote : source.entries_of(block.tensor)) {
        const auto region = intersect(remote.box, *part);
        if (!region) continue;
        copies.clear();
        append_copies(*region, remote.box, remote.offset_bytes, tile, at, element_bytes, copies);
        for (const StridedCopy& copy : copies) {
          out.reads.push_back({remote.segment, 0, copy});
        }
      }
    }
    if (!completes) return;
    for (const LayoutEntry& local : destination->entries_of(block.tensor)) {
      const auto region = intersect(local.box, tile);
      if (!region) continue;
      copies.clear();
      append_copies(*region, tile, at, local.box, local.offset_bytes, element_bytes, copies);
      for (const StridedCopy& copy : copies) out.scatter.push_back({local.segment, copy});
    }
  };
  out.staging_bytes = for_each_staged_tile(*checkpoint, blocks_of(slice), visit);
  merge_reads(out.reads);
  merge_scatter(out.scatter);
}

std::uint64_t PlanTable::memory_bytes() const {
  std::uint64_t bytes = slices.size() * sizeof(Slice) + groups.size() * sizeof(Group) +
                        missing_boxes.size() * sizeof(MissingBox);
  for (const auto& bucket : pieces) bytes += sizeof bucket + bucket.size() * sizeof(Piece);
  for (const Group& group : groups) bytes += group.blocks.size() * sizeof(Piece);
  return bytes;
}

bool PlanTable::covered_by(SliceIndex slice, const Layout& source, bool proves_parts) const {
  const auto own = pieces_of(slice);
  return std::all_of(own.begin(), own.end(), [&](const Piece& piece) {
    const auto entries = source.entries_of(piece.tensor);
    if (slices[slice].kind != SliceKind::kRange) {
      return entries_cover(entries, piece.region) == Cover::kAll;
    }
    const TileGrid& grid = checkpoint->tiles.grid(piece.tensor);
    if (entries_cover(entries, grid.align_out(piece.region)) == Cover::kAll) return true;
    return proves_parts && proves(entries, piece);
  });
}

// Whether a source with these entries keeps a proof of each part that the piece has of a tile.
bool PlanTable::proves(std::span<const LayoutEntry> entries, const Piece& piece) const {
  const TileGrid& grid = checkpoint->tiles.grid(piece.tensor);
  std::vector<std::uint64_t> locals;
  grid.tiles_of(piece.region, locals);
  return std::ranges::all_of(locals, [&](std::uint64_t local) {
    const Box tile = grid.tile_box(local);
    const Box part = *intersect(tile, piece.region);
    const auto kept = kept_proofs(entries, tile, element_bytes_of(*checkpoint, piece.tensor));
    return entries_cover(entries, tile) == Cover::kAll ||
           std::ranges::any_of(kept,
                               [&](const KeptProof& one) { return contains(one.part, part); });
  });
}

void PlanTable::tiles_read(SliceIndex slice, std::vector<TileIndex>& out) const {
  out.clear();
  std::vector<std::uint64_t> locals;
  for (const Piece& piece : pieces_of(slice)) {
    locals.clear();
    checkpoint->tiles.grid(piece.tensor).tiles_of(piece.region, locals);
    const TileIndex first = checkpoint->tiles.first_tile(piece.tensor);
    for (const std::uint64_t local : locals) out.push_back(first + static_cast<TileIndex>(local));
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
}

void PlanTable::tiles(SliceIndex slice, std::vector<TileWork>& out) const {
  out.clear();
  if (!completes_tiles(slice)) return;
  const TileMap& map = checkpoint->tiles;
  if (slices[slice].kind == SliceKind::kRange) {
    return range_tiles(slice, out);
  }
  const bool staged = slices[slice].kind == SliceKind::kStaged;
  for_each_staged_tile(
      *checkpoint, blocks_of(slice),
      [&](const Piece& block, const Box& tile, std::uint64_t local, std::uint64_t at) {
        const TileIndex index = map.first_tile(block.tensor) + static_cast<TileIndex>(local);
        out.push_back({index, block.tensor, tile, staged ? at : 0});
      });
}

void PlanTable::range_tiles(SliceIndex slice, std::vector<TileWork>& out) const {
  std::vector<std::uint64_t> locals;
  for (const Piece& piece : pieces_of(slice)) {
    const TileGrid& grid = checkpoint->tiles.grid(piece.tensor);
    locals.clear();
    grid.tiles_of(piece.region, locals);
    for (const std::uint64_t local : locals) {
      const TileIndex index =
          checkpoint->tiles.first_tile(piece.tensor) + static_cast<TileIndex>(local);
      out.push_back({index, piece.tensor, *intersect(grid.tile_box(local), piece.region), 0});
    }
  }
}

}  // namespace rekindle::planner
