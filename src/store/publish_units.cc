#include "src/store/publish_units.h"

#include <algorithm>
#include <utility>

namespace rekindle::store {

namespace {

class Builder {
 public:
  explicit Builder(std::uint64_t target_bytes) : target_bytes_(target_bytes) {}

  void add(std::uint32_t segment, std::uint64_t offset, std::uint64_t bytes, UnitPiece piece) {
    const bool joins = !units_.empty() && units_.back().segment == segment &&
                       units_.back().offset_bytes + units_.back().size_bytes == offset &&
                       units_.back().size_bytes + bytes <= target_bytes_;
    if (!joins) units_.push_back({segment, offset, 0, {}});
    units_.back().size_bytes += bytes;
    units_.back().pieces.push_back(piece);
  }
  std::vector<PublishUnit> take() { return std::move(units_); }

 private:
  const std::uint64_t target_bytes_;
  std::vector<PublishUnit> units_;
};

}  // namespace

std::vector<PublishUnit> publish_units(const TensorSet& tensors, const TileMap& tiles,
                                       const Layout& layout, std::uint64_t target_bytes) {
  const auto entries = layout.entries();
  std::vector<std::uint32_t> order(entries.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::pair(entries[a].segment, entries[a].offset_bytes) <
           std::pair(entries[b].segment, entries[b].offset_bytes);
  });
  Builder builder(target_bytes);
  for (const std::uint32_t i : order) {
    const LayoutEntry& entry = entries[i];
    const TensorInfo& tensor = tensors[entry.tensor];
    const TileGrid& grid = tiles.grid(entry.tensor);
    const std::uint64_t count = grid.tile_count();
    const std::uint64_t bytes = tensor.size_bytes();
    if (count == 0) continue;
    if (count == 1) {
      builder.add(entry.segment, entry.offset_bytes, bytes, {i, 0, 1});
      continue;
    }
    // Tiles with the same first coordinate make a slab: consecutive tiles, a contiguous range.
    const std::uint64_t rows = grid.tile_extent()[0];
    const std::uint64_t slabs = (tensor.shape[0] - 1) / rows + 1;
    const std::uint64_t slab_bytes = bytes / tensor.shape[0] * rows;
    const std::uint64_t slab_tiles = count / slabs;
    const std::uint64_t group = std::max<std::uint64_t>(1, target_bytes / slab_bytes);
    for (std::uint64_t slab = 0; slab < slabs; slab += group) {
      const std::uint64_t end = std::min(slabs, slab + group);
      const std::uint64_t begin_bytes = slab * slab_bytes;
      builder.add(entry.segment, entry.offset_bytes + begin_bytes,
                  std::min(bytes, end * slab_bytes) - begin_bytes,
                  {i, slab * slab_tiles, end * slab_tiles});
    }
  }
  return builder.take();
}

}  // namespace rekindle::store
