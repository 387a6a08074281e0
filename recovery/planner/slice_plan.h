#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"
#include "transport/read_op.h"

// The planner decides which bytes of which source land where. Pure: no I/O, no clock,
// deterministic.
namespace rekindle::planner {

using transport::SliceIndex;
using transport::SourceIndex;
using transport::SourceMask;

// The holdings of one source: a layout, and the tiles of it that are there (null: all that its
// boxes cover).
struct SourceView {
  const Layout* layout = nullptr;
  const TileSet* held = nullptr;
  // It keeps the proofs of the parts of tiles that it has (kept_proofs() in held_tile.h).
  bool proves_parts = false;
};

struct PlanOptions {
  // Upper bound of a slice; at least one tile.
  std::uint64_t slice_bytes = 4 << 20;
  // A bucket is a run of slices. Progress is counted in buckets.
  std::uint64_t bucket_bytes = 16 << 20;
  // Wanting a part of a tile means fetching the whole tile, unless that more than doubles the bytes
  // of the tensor, or no source has the whole tile: then a part that is one run of its tile is
  // fetched alone, and its source proves it (kRange).
  double max_partial_overhead = 2.0;
  // Tensors whose tiles are at most this are fetched in whole tiles at any overhead: a few KiB cost
  // less than asking a source for proofs.
  std::uint64_t small_tile_bytes = kWholeTensorTileBytes;
};

struct PlanRequest {
  const Checkpoint* checkpoint = nullptr;
  // Its boxes are wanted.
  const Layout* destination = nullptr;
  // At most transport::kMaxSources. Several may share a layout.
  std::span<const SourceView> sources;
  // Tiles already verified at the destination; may be null.
  const TileSet* have = nullptr;
};

enum class SliceKind : std::uint8_t {
  // Whole tiles, read straight into the destination and verified there.
  kDirect,
  // Partial tiles: read whole into staging and verified there; the wanted parts are copied out.
  kStaged,
  // Parts of tiles, read straight into the destination. A source proves that they belong to their
  // tiles (src/tensor/tile_proof.h). The candidates hold those tiles whole, or keep proofs of parts
  // that have all that is read.
  kRange,
};

// One read: its source and its destination. Those of kStaged slices land in staging: offsets count
// from the start of the staging memory, which the slices of a group share.
struct PlannedRead {
  std::uint32_t remote_segment = 0;
  // 0 in kStaged slices.
  std::uint32_t local_segment = 0;
  // src: offset in the remote segment file; dst: in the local segment or staging.
  StridedCopy copy;
};

// A copy from staging to a destination segment.
struct PlannedScatter {
  std::uint32_t local_segment = 0;
  // src: offset in staging; dst: in the destination segment file.
  StridedCopy copy;
};

struct Expansion {
  std::vector<PlannedRead> reads;
  // Of the last slice of a kStaged group, once its tiles have verified.
  std::vector<PlannedScatter> scatter;
  // 0: none needed, in kDirect and kRange slices.
  std::uint64_t staging_bytes = 0;
};

// One tile (or part of one) that a slice completes. In kRange a tile may be listed several times,
// with disjoint boxes: it is complete when all of them are.
struct TileWork {
  TileIndex tile = 0;
  TensorIndex tensor = 0;
  // The box that lands: the whole tile, or a part (kRange).
  Box box;
  // kStaged: the start of the tile in staging, packed row-major.
  std::uint64_t staging_offset = 0;
};

struct MissingBox {
  TensorIndex tensor = 0;
  Box box;
};

// Refers to the checkpoint and the layouts of its request (not to `have` and `held`): they must
// outlive it.
class Plan {
 public:
  virtual ~Plan() = default;
  virtual SliceIndex slice_count() const = 0;
  // On the wire.
  virtual std::uint64_t slice_bytes(SliceIndex slice) const = 0;
  virtual SliceKind kind(SliceIndex slice) const = 0;
  virtual SourceMask candidates(SliceIndex slice) const = 0;
  virtual std::uint32_t bucket(SliceIndex slice) const = 0;
  virtual std::uint32_t bucket_count() const = 0;
  // Replaces `out`. Deterministic; `source` must be a candidate.
  virtual void expand(SliceIndex slice, SourceIndex source, Expansion& out) const = 0;
  // For a source that came after the plan was made: true when it can bring the whole slice, once it
  // holds all of its layout. Then expand_from() replaces `out` with its reads. `proves_parts`: see
  // SourceView.
  virtual bool covered_by(SliceIndex slice, const Layout& source, bool proves_parts) const = 0;
  virtual void expand_from(SliceIndex slice, const Layout& source, Expansion& out) const = 0;
  // Replaces `out`: the tiles of which the slice reads some bytes, ascending. A source can serve
  // the slice when it holds its layout's part of all of these.
  virtual void tiles_read(SliceIndex slice, std::vector<TileIndex>& out) const = 0;
  // Replaces `out`: the tiles that are complete when this slice has landed. A tile that several
  // sources hold only in parts, or a row of tiles wider than a slice, is spread over several slices
  // of one group: it is listed by the last slice of the group, and group_size/group_first say which
  // slices must have landed, too, in whatever order. A group lies in one bucket.
  virtual void tiles(SliceIndex slice, std::vector<TileWork>& out) const = 0;
  virtual SliceIndex group_first(SliceIndex slice) const = 0;
  virtual SliceIndex group_size(SliceIndex slice) const = 0;

  // Of all slices.
  virtual std::uint64_t wire_bytes() const = 0;
  // Of the destination, without `have`.
  virtual std::uint64_t wanted_bytes() const = 0;
  // The parts of the wanted tiles that no source holds. A wanted part that no source can prove is
  // verified with the rest of its tile. Empty: the plan covers each wanted element exactly once.
  virtual std::span<const MissingBox> missing() const = 0;
  // Of the plan itself, nearly.
  virtual std::uint64_t memory_bytes() const = 0;
};

Result<std::unique_ptr<Plan>> plan_pull(const PlanRequest& request, const PlanOptions& options);

// The missing tensors on one line: at most `limit`, then "and N more".
std::string describe_missing(const Checkpoint& checkpoint, std::span<const MissingBox> missing,
                             std::size_t limit);

}  // namespace rekindle::planner
