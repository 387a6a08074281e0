#include "src/tensor/tile.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <unordered_map>

namespace rekindle {

namespace {

constexpr std::uint64_t kLastDimensionCut = 16;

std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) {
  return value / by + (value % by != 0);
}

// The extents of a tile for a tensor above kWholeTensorTileBytes.
Dims choose_tile_extent(const Shape& shape, std::uint64_t element_bytes) {
  Dims tile = shape;
  const std::size_t last = shape.rank() - 1;
  if (shape.rank() >= 2 && shape[last] % kLastDimensionCut == 0 &&
      shape[last] / kLastDimensionCut * element_bytes >= kMinTileRunBytes) {
    tile[last] /= kLastDimensionCut;
  }
  for (std::size_t i = 0; i < shape.rank(); ++i) {
    const std::uint64_t bytes = tile.product() * element_bytes;
    if (bytes <= kMaxTileBytes) break;
    tile[i] = std::max<std::uint64_t>(1, kMaxTileBytes / (bytes / tile[i]));
  }
  return tile;
}

}  // namespace

TileGrid::TileGrid(DType dtype, const Shape& shape)
    : shape_(shape), tile_extent_(shape), grid_(Dims::zeros(shape.rank())) {
  const std::uint64_t element_bytes = dtype_size_bytes(dtype);
  const std::uint64_t bytes = shape.product() * element_bytes;
  if (bytes == 0) return;
  if (bytes > kWholeTensorTileBytes) tile_extent_ = choose_tile_extent(shape, element_bytes);
  for (std::size_t i = 0; i < shape.rank(); ++i) grid_[i] = ceil_div(shape[i], tile_extent_[i]);
  count_ = grid_.product();
}

Box TileGrid::tile_box(std::uint64_t local_index) const {
  Box box = Box::whole(tile_extent_);
  for (std::size_t i = shape_.rank(); i-- > 0;) {
    box.offset[i] = local_index % grid_[i] * tile_extent_[i];
    box.extent[i] = std::min(tile_extent_[i], shape_[i] - box.offset[i]);
    local_index /= grid_[i];
  }
  return box;
}

Box TileGrid::align_out(const Box& box) const {
  if (box.empty()) return box;
  Box aligned = box;
  for (std::size_t i = 0; i < shape_.rank(); ++i) {
    const std::uint64_t begin = box.offset[i] / tile_extent_[i];
    const std::uint64_t end = ceil_div(box.offset[i] + box.extent[i], tile_extent_[i]);
    aligned.offset[i] = begin * tile_extent_[i];
    const std::uint64_t room = shape_[i] - aligned.offset[i];
    aligned.extent[i] =
        end - begin > room / tile_extent_[i] ? room : (end - begin) * tile_extent_[i];
  }
  return aligned;
}

void TileGrid::tiles_of(const Box& box, std::vector<std::uint64_t>& out) const {
  if (box.empty() || count_ == 0) return;
  const std::size_t rank = shape_.rank();
  Dims begin = Dims::zeros(rank);
  Dims end = Dims::zeros(rank);
  for (std::size_t i = 0; i < rank; ++i) {
    begin[i] = box.offset[i] / tile_extent_[i];
    end[i] = ceil_div(box.offset[i] + box.extent[i], tile_extent_[i]);
  }
  Dims at = begin;
  while (true) {
    std::uint64_t index = 0;
    for (std::size_t i = 0; i < rank; ++i) index = index * grid_[i] + at[i];
    out.push_back(index);
    std::size_t i = rank;
    for (; i-- > 0;) {
      if (++at[i] < end[i]) break;
      at[i] = begin[i];
    }
    if (i == std::numeric_limits<std::size_t>::max()) return;
  }
}

namespace {

// What decides the grid of a tensor. The shape outlives it.
struct Kind {
  const Shape* shape;
  DType dtype;

  bool operator==(const Kind& other) const {
    return dtype == other.dtype && std::ranges::equal(shape->span(), other.shape->span());
  }
};

struct KindHash {
  std::size_t operator()(const Kind& kind) const {
    constexpr std::uint64_t kPrime = 0x9e3779b97f4a7c15;
    auto hash = static_cast<std::uint64_t>(kind.dtype);
    for (const std::uint64_t extent : kind.shape->span()) {
      hash = (std::rotl(hash, 5) ^ extent) * kPrime;
    }
    return hash ^ (hash >> 32);
  }
};

}  // namespace

Result<TileMap> TileMap::create(const TensorSet& tensors) {
  TileMap map;
  map.first_.reserve(tensors.size() + 1);
  map.grid_of_.reserve(tensors.size());
  std::unordered_map<Kind, std::uint32_t, KindHash> known;
  std::uint64_t next = 0;
  map.first_.push_back(0);
  for (const TensorInfo& tensor : tensors.tensors()) {
    const auto [at, is_new] = known.try_emplace({&tensor.shape, tensor.dtype},
                                                static_cast<std::uint32_t>(map.grids_.size()));
    if (is_new) map.grids_.emplace_back(tensor.dtype, tensor.shape);
    map.grid_of_.push_back(at->second);
    next += map.grids_[at->second].tile_count();
    if (next > std::numeric_limits<TileIndex>::max()) {
      return fail(ErrorCode::kInvalid,
                  "the checkpoint has more than 2^32 - 1 tiles (at tensor '{}')", tensor.name);
    }
    map.first_.push_back(static_cast<TileIndex>(next));
  }
  return map;
}

TensorIndex TileMap::tensor_of(TileIndex tile) const {
  const auto after = std::upper_bound(first_.begin(), first_.end(), tile);
  return static_cast<TensorIndex>(after - first_.begin() - 1);
}

Box TileMap::tile_box(TileIndex tile) const {
  const TensorIndex tensor = tensor_of(tile);
  return grid(tensor).tile_box(tile - first_[tensor]);
}

void TileSet::set_range(TileIndex begin, TileIndex end) {
  for (std::uint64_t tile = begin; tile < end;) {
    if (tile % 64 == 0 && end - tile >= 64) {
      words_[tile / 64] = ~std::uint64_t{0};
      tile += 64;
    } else {
      set(static_cast<TileIndex>(tile++));
    }
  }
}

TileIndex TileSet::count() const {
  TileIndex total = 0;
  for (const std::uint64_t word : words_) total += static_cast<TileIndex>(std::popcount(word));
  return total;
}

std::vector<std::pair<TileIndex, TileIndex>> TileSet::ranges() const {
  std::vector<std::pair<TileIndex, TileIndex>> result;
  for (std::size_t w = 0; w < words_.size(); ++w) {
    std::uint64_t word = words_[w];
    while (word != 0) {
      const int begin = std::countr_zero(word);
      const int length = std::countr_one(word >> begin);
      const auto first = static_cast<TileIndex>(w * 64 + static_cast<std::size_t>(begin));
      const auto last = static_cast<TileIndex>(first + static_cast<TileIndex>(length));
      if (!result.empty() && result.back().second == first) {
        result.back().second = last;
      } else {
        result.emplace_back(first, last);
      }
      if (begin + length == 64) break;
      word &= ~std::uint64_t{0} << (begin + length);
    }
  }
  return result;
}

std::vector<TileIndex> TileSet::tiles() const {
  std::vector<TileIndex> result;
  result.reserve(count());
  for (const auto& [begin, end] : ranges()) {
    for (TileIndex tile = begin; tile < end; ++tile) result.push_back(tile);
  }
  return result;
}

}  // namespace rekindle
