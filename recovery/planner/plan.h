#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"
#include "transport/types.h"

// The planner: which bytes of which source land where. Pure: no I/O, no clock, deterministic.
namespace rekindle::planner {

using transport::SliceIndex;
using transport::SourceIndex;
using transport::SourceMask;

// What one source holds: a layout, and which tiles of it are there (null: all that its boxes
// cover).
struct SourceView {
  const Layout* layout = nullptr;
  const TileSet* held = nullptr;
};

struct PlanOptions {
  std::uint64_t slice_bytes = 4 << 20;    // upper bound of a slice, at least one tile
  std::uint64_t bucket_bytes = 16 << 20;  // a run of slices; progress is counted in these
  // The source gathers strided reads itself (TCP, shm). When false, runs shorter than
  // `short_run_bytes` that cover at least half of their range are read as one range and scattered.
  bool source_gathers = true;
  std::uint64_t short_run_bytes = 4096;
  // Wanting a part of a tile means fetching the whole tile, unless that more than doubles the bytes
  // of the tensor: then a part that is one run of its tile is fetched alone, and a source that
  // holds the whole tile proves it (kRange).
  double max_partial_overhead = 2.0;
  // Tensors whose tiles are at most this are fetched in whole tiles at any overhead: a few KiB cost
  // less than asking a source for proofs.
  std::uint64_t small_tile_bytes = kWholeTensorTileBytes;
};

struct PlanRequest {
  const Checkpoint* checkpoint = nullptr;
  const Layout* destination = nullptr;  // its boxes are what is wanted
  std::span<const SourceView>
      sources;                    // at most transport::kMaxSources; several may share a layout
  const TileSet* have = nullptr;  // tiles already verified at the destination; may be null
};

enum class SliceKind : std::uint8_t {
  kDirect,  // whole tiles, read straight into the destination, verified there
  kStaged,  // partial tiles: read whole into staging, verified there, wanted parts copied out
  kRange,   // parts of tiles, read straight into the destination; a source proves that they belong
            // to their tiles (src/tensor/tile_proof.h). Its candidates hold those tiles whole.
};

// Where bytes are read from and to. Staging offsets count from the start of the slice's staging
// memory; the slices of one kStaged group share one such memory. In kDirect and kRange slices
// without covering reads `to_staging` is false and `local_offset` is in destination segment
// `local_segment`.
struct PlannedRead {
  std::uint32_t remote_segment = 0;
  bool to_staging = false;
  std::uint32_t local_segment = 0;
  StridedCopy copy;  // src: offset in the remote segment file; dst: in the local segment or staging
};

// A copy from staging to a destination segment.
struct PlannedScatter {
  std::uint32_t local_segment = 0;
  StridedCopy copy;  // src: offset in staging; dst: in the destination segment file
};

struct Expansion {
  std::vector<PlannedRead> reads;
  std::vector<PlannedScatter> scatter;  // kDirect: before verifying; kStaged: after verifying
  std::uint64_t staging_bytes = 0;      // 0: none needed
};

// One tile (or part of one) that a slice completes. In kRange a tile may be listed several times,
// with disjoint boxes: it is complete when all of them are.
struct TileWork {
  TileIndex tile = 0;
  TensorIndex tensor = 0;
  Box box;                           // what lands: the whole tile, or a part (kRange)
  std::uint64_t staging_offset = 0;  // kStaged: where the tile starts in staging, packed row-major
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
  virtual std::uint64_t slice_bytes(SliceIndex slice) const = 0;  // on the wire (without covering)
  virtual SliceKind kind(SliceIndex slice) const = 0;
  virtual SourceMask candidates(SliceIndex slice) const = 0;
  virtual std::uint32_t bucket(SliceIndex slice) const = 0;
  virtual std::uint32_t bucket_count() const = 0;
  // Replaces `out`. Deterministic; `source` must be a candidate.
  virtual void expand(SliceIndex slice, SourceIndex source, Expansion& out) const = 0;
  // For a source that came after the plan was made: whether boxes of its layout cover all that the
  // slice reads, and then its reads.
  virtual bool covered_by(SliceIndex slice, const Layout& source) const = 0;
  virtual void expand_from(SliceIndex slice, const Layout& source, Expansion& out) const = 0;
  // Replaces `out`: the tiles that the slice reads some of, ascending. Who holds what its layout
  // has of all of these can serve the slice.
  virtual void tiles_read(SliceIndex slice, std::vector<TileIndex>& out) const = 0;
  // Replaces `out`: the tiles that are complete when this slice has landed. A tile that several
  // sources hold only in parts, or a row of tiles wider than a slice, is spread over several slices
  // of one group: it is listed by the last slice of the group, and group_size/group_first say which
  // slices must have landed, too, in whatever order. A group lies in one bucket.
  virtual void tiles(SliceIndex slice, std::vector<TileWork>& out) const = 0;
  virtual SliceIndex group_first(SliceIndex slice) const = 0;
  virtual SliceIndex group_size(SliceIndex slice) const = 0;

  virtual std::uint64_t wire_bytes() const = 0;    // all slices
  virtual std::uint64_t wanted_bytes() const = 0;  // of the destination, without `have`
  // What no source holds of the tiles that are wanted, in whole or in part: a part is verified with
  // the rest of its tile. Empty means that the plan covers each wanted element exactly once.
  virtual std::span<const MissingBox> missing() const = 0;
};

Result<std::unique_ptr<Plan>> plan_pull(const PlanRequest& request, const PlanOptions& options);

// The tensors that are missing, on one line: at most `limit`, then "and N more".
std::string describe_missing(const Checkpoint& checkpoint, std::span<const MissingBox> missing,
                             std::size_t limit);

}  // namespace rekindle::planner
