#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/layout.h"
#include "src/tensor/tile.h"

// The tensors of a session, where their bytes lie, and how many of them are here. Pure.
namespace rekindle::bucket {

struct NamedBox {
  std::string tensor;
  // In elements. Empty: the whole tensor.
  std::vector<std::uint64_t> offset;
  std::vector<std::uint64_t> extent;
  bool operator==(const NamedBox&) const = default;
};

// One box as the worker gets it. A box that is contiguous in the agent's copy is used in place. Its
// texts, lists and its box belong to the Contents: there may be as many pieces as tensors, and an
// attach makes them all.
class Piece {
 public:
  // `info` and `box` outlive it.
  Piece(const TensorInfo& info, TensorIndex index, const Box& box)
      : bytes(box.elements() * dtype_size_bytes(info.dtype)),
        tensor(index),
        whole(is_whole(box, info.shape)),
        info_(&info),
        box_(&box) {}

  // Both texts are followed by a zero.
  std::string_view name() const { return info_->name; }
  std::string_view dtype() const { return dtype_name(info_->dtype); }
  std::span<const std::uint64_t> full_shape() const { return info_->shape.span(); }
  std::span<const std::uint64_t> shape() const { return box_->extent.span(); }
  std::span<const std::uint64_t> offset() const { return box_->offset.span(); }
  const Box& box() const { return *box_; }

  std::uint64_t bytes = 0;
  TensorIndex tensor = 0;
  // The box is the whole tensor.
  bool whole = false;
  bool in_place = false;
  std::uint64_t tiles_missing = 0;
  // If in_place: the place of its first element.
  std::uint32_t segment = 0;
  std::uint64_t offset_bytes = 0;

 private:
  const TensorInfo* info_;
  const Box* box_;
};

class Contents {
 public:
  Contents(Contents&&) = default;
  Contents& operator=(Contents&&) = default;
  ~Contents() = default;

  // From Attached. `wanted` empty: every box of the layout. kInternal: the parts of the message do
  // not fit together, for example a wanted box that the layout lacks, or a segment that is too
  // short.
  static Result<Contents> create(std::string_view tensor_set, std::string_view layout,
                                 std::span<const NamedBox> wanted,
                                 std::span<const std::uint64_t> segment_bytes);

  // Sorted by tensor, and so by name. They never move, and only tiles_missing changes.
  std::span<const Piece> pieces() const { return pieces_; }
  // Of the whole version.
  const TensorSet& tensors() const { return tensors_; }
  const TileMap& tiles() const { return tiles_; }
  std::uint64_t element_bytes(const Piece& piece) const {
    return dtype_size_bytes(tensors_[piece.tensor].dtype);
  }
  std::uint64_t total_bytes() const { return total_bytes_; }
  std::uint64_t ready_bytes() const { return ready_bytes_; }

  // Tiles that have verified. Appends the pieces that are now complete, each only once.
  Result<void> mark_ready(const TileRuns& runs, std::vector<std::size_t>& complete);
  void mark_all_ready(std::vector<std::size_t>& complete);
  // Appends the pieces that need no tile. Called once, after create().
  void take_empty(std::vector<std::size_t>& complete);

  // Appends the copies that gather a part of a piece, row-major, from the segments. Their
  // destination offsets count from the part's first byte. `part` lies in the piece's box.
  struct Gather {
    std::uint32_t segment = 0;
    // Its src_offset counts from the segment's start.
    StridedCopy copy;
  };
  void gather(const Piece& piece, const Box& part, std::vector<Gather>& out) const;
  // For a piece that is not in place: copies its elements from the segments to `out`.
  void gather(const Piece& piece, std::span<const std::byte* const> segments, std::byte* out) const;

 private:
  Contents(TensorSet tensors, Layout layout, TileMap tiles)
      : tensors_(std::move(tensors)), layout_(std::move(layout)), tiles_(std::move(tiles)) {}
  Result<void> add_wanted(const NamedBox& wanted);
  void add_entry(const LayoutEntry& entry);
  void add(Piece piece);
  void finish();
  void mark_tile(TileIndex tile, TensorIndex tensor, std::vector<std::size_t>& complete);
  void complete_piece(std::size_t index, std::vector<std::size_t>& complete);

  TensorSet tensors_;
  Layout layout_;
  TileMap tiles_;
  TileSet ready_;
  // Those that `create` was asked for. They never move.
  std::deque<Box> wanted_;
  std::vector<Piece> pieces_;
  // Per tensor, plus one past the end.
  std::vector<std::size_t> first_piece_;
  std::uint64_t total_bytes_ = 0;
  std::uint64_t ready_bytes_ = 0;
};

}  // namespace rekindle::bucket
