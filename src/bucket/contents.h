#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/layout.h"
#include "src/tensor/tile.h"

// What a session hands out, where its bytes lie, and how much of it is here. Pure.
namespace rekindle::bucket {

struct NamedBox {
  std::string tensor;
  std::vector<std::uint64_t> offset;  // in elements; empty: the whole tensor
  std::vector<std::uint64_t> extent;
  bool operator==(const NamedBox&) const = default;
};
using TileRuns = std::vector<std::pair<TileIndex, TileIndex>>;  // [begin, end)

// One box as the worker gets it. When the agent's copy holds it contiguously, it is used in place.
// What it refers to belongs to the Contents: there may be as many as there are tensors.
struct Piece {
  std::string_view name;   // a zero follows
  std::string_view dtype;  // likewise
  std::span<const std::uint64_t> full_shape;
  std::uint64_t bytes = 0;

  std::span<const std::uint64_t> shape() const { return box.extent.span(); }
  std::span<const std::uint64_t> offset() const { return box.offset.span(); }

  TensorIndex tensor = 0;
  Box box;
  bool whole = false;  // the box is all of the tensor
  std::uint64_t tiles_missing = 0;
  bool in_place = false;
  std::uint32_t segment = 0;       // in_place: where its first element is
  std::uint64_t offset_bytes = 0;  // in_place
};

class Contents {
 public:
  Contents(Contents&&) = default;
  Contents& operator=(Contents&&) = default;
  ~Contents() = default;

  // From Attached. `wanted` empty: every box of the layout. kInternal when the agent's words do not
  // fit together: a wanted box that the layout lacks, a segment that is too short.
  static Result<Contents> create(std::string_view tensor_set, std::string_view layout,
                                 std::span<const NamedBox> wanted,
                                 std::span<const std::uint64_t> segment_bytes);

  // Sorted by tensor, and so by name; they neither move nor change but for tiles_missing.
  std::span<const Piece> pieces() const { return pieces_; }
  const TensorSet& tensors() const { return tensors_; }  // of the whole version
  const TileMap& tiles() const { return tiles_; }
  std::uint64_t element_bytes(const Piece& piece) const {
    return dtype_size_bytes(tensors_[piece.tensor].dtype);
  }
  std::uint64_t total_bytes() const { return total_bytes_; }
  std::uint64_t ready_bytes() const { return ready_bytes_; }

  // Tiles that have verified. Appends the pieces that are complete now, each once in its life.
  Result<void> mark_ready(const TileRuns& runs, std::vector<std::size_t>& complete);
  void mark_all_ready(std::vector<std::size_t>& complete);
  // Those that need no tile at all; once, after create().
  void take_empty(std::vector<std::size_t>& complete);

  // How to bring a part of a piece together, row-major, from the segments: appends copies whose
  // destination offsets count from the part's first byte. `part` lies in the piece's box.
  struct Gather {
    std::uint32_t segment = 0;
    StridedCopy copy;  // src_offset from the segment's start
  };
  void gather(const Piece& piece, const Box& part, std::vector<Gather>& out) const;
  // For a piece that is not in place: copies its elements together from the segments.
  void gather(const Piece& piece, std::span<const std::byte* const> segments, std::byte* out) const;

 private:
  Contents(TensorSet tensors, Layout layout, TileMap tiles)
      : tensors_(std::move(tensors)), layout_(std::move(layout)), tiles_(std::move(tiles)) {}
  Result<void> add_wanted(const NamedBox& wanted);
  Result<void> add_piece(TensorIndex tensor, const Box& box);
  void finish();
  void mark_tile(TileIndex tile, TensorIndex tensor, std::vector<std::size_t>& complete);
  void complete_piece(std::size_t index, std::vector<std::size_t>& complete);

  TensorSet tensors_;
  Layout layout_;
  TileMap tiles_;
  TileSet ready_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> first_piece_;  // per tensor, plus one past the end
  std::uint64_t total_bytes_ = 0;
  std::uint64_t ready_bytes_ = 0;
};

}  // namespace rekindle::bucket
