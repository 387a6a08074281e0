#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/tensor/box.h"
#include "src/tensor/tensor_set.h"

// Tiles: the unit of integrity and resume, cut from the shape and dtype alone, so that every layout
// agrees on them. A tile is at most 1 MiB. Rules, in this order:
//   1. a tensor of at most 64 KiB is one tile (an empty tensor has none);
//   2. rank >= 2: the last dimension is cut in 16 (the cut of row-parallel TP) if 16 divides it and
//      that leaves runs of at least a cache line;
//   3. then dimension 0, 1, … and at last the last one are cut until a tile fits in 1 MiB.
// Tiles are numbered row-major over the grid (last dimension fastest).
namespace rekindle {

inline constexpr std::uint64_t kMaxTileBytes = 1 << 20;
inline constexpr std::uint64_t kWholeTensorTileBytes = 64 << 10;
inline constexpr std::uint64_t kMinTileRunBytes = 64;

using TileIndex = std::uint32_t;  // within a checkpoint; at most 2^32 - 1 of them
// Each run is [begin, end).
using TileRuns = std::vector<std::pair<TileIndex, TileIndex>>;

class TileGrid {
 public:
  TileGrid(DType dtype, const Shape& shape);

  std::uint64_t tile_count() const { return count_; }
  const Dims& tile_extent() const { return tile_extent_; }  // of a tile that is not at the border
  Box tile_box(std::uint64_t local_index) const;
  // The smallest box of whole tiles that contains `box`.
  Box align_out(const Box& box) const;
  // Local indices of the tiles that share an element with `box`, ascending.
  void tiles_of(const Box& box, std::vector<std::uint64_t>& out) const;

 private:
  Shape shape_;
  Dims tile_extent_;
  Dims grid_;  // tiles per dimension
  std::uint64_t count_ = 0;
};

// Numbers the tiles of a whole tensor set: tensor i has [first_tile(i), first_tile(i + 1)).
class TileMap {
 public:
  static Result<TileMap> create(const TensorSet& tensors);  // kInvalid beyond 2^32 - 1 tiles

  TileIndex tile_count() const { return first_.back(); }
  TileIndex first_tile(TensorIndex tensor) const { return first_[tensor]; }
  TensorIndex tensor_of(TileIndex tile) const;
  const TileGrid& grid(TensorIndex tensor) const { return grids_[grid_of_[tensor]]; }
  Box tile_box(TileIndex tile) const;

 private:
  std::vector<TileIndex> first_;
  // Tensors of equal dtype and shape share a grid: most checkpoints have a few dozen.
  std::vector<TileGrid> grids_;
  std::vector<std::uint32_t> grid_of_;  // per tensor
};

// BLAKE3 of the elements of a box in row-major order. `array` holds `held` row-major, and `held`
// contains the box. Of a tile this is its leaf: it depends on the bytes alone, so equal tiles of
// two versions have equal leaves. checkpoint_root() binds it to its place.
Digest digest_box(const Box& box, std::uint64_t element_bytes, std::span<const std::byte> array,
                  const Box& held);
Digest digest_tile(const TensorInfo& info, const TileGrid& grid, std::uint64_t local_tile,
                   std::span<const std::byte> array, const Box& held);
// Of several boxes one after the other, each in the array that holds it; never equal to the leaf of
// a tile.
struct HeldBox {
  Box box;
  std::span<const std::byte> array;
  Box held;
};
Digest digest_parts(std::span<const HeldBox> parts, std::uint64_t element_bytes);

// The root of a checkpoint (docs/internals/integrity.md): a Merkle root over the model, the
// version, the tensor set and, tensor by tensor, the leaves of its tiles. `leaves` has one digest
// per tile of `tiles`. The same for all layouts.
Digest checkpoint_root(const ModelVersion& id, const TensorSet& tensors, const TileMap& tiles,
                       std::span<const Digest> leaves);

// A set of tiles, as a bitmap; thread-compatible.
class TileSet {
 public:
  TileSet() = default;
  explicit TileSet(TileIndex size) : words_((size + 63) / 64), size_(size) {}

  TileIndex size() const { return size_; }
  bool test(TileIndex tile) const { return words_[tile / 64] >> (tile % 64) & 1; }
  void set(TileIndex tile) { words_[tile / 64] |= std::uint64_t{1} << (tile % 64); }
  void reset(TileIndex tile) { words_[tile / 64] &= ~(std::uint64_t{1} << (tile % 64)); }
  void set_range(TileIndex begin, TileIndex end);
  TileIndex count() const;
  bool all() const { return count() == size_; }
  // Maximal runs [begin, end) in ascending order.
  std::vector<std::pair<TileIndex, TileIndex>> ranges() const;
  std::vector<TileIndex> tiles() const;  // ascending
  std::span<std::uint64_t> words() { return words_; }
  std::span<const std::uint64_t> words() const { return words_; }

 private:
  std::vector<std::uint64_t> words_;
  TileIndex size_ = 0;
};

}  // namespace rekindle
