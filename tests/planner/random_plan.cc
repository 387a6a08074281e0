#include "tests/planner/random_plan.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

namespace rekindle::planner::testing {

namespace {

constexpr DType kTypes[] = {DType::kU8, DType::kBF16, DType::kF32, DType::kF64, DType::kF8E4M3};

TensorInfo random_tensor(Random& random, std::size_t number, Size size) {
  TensorInfo info;
  info.name = "t" + std::to_string(number);
  info.dtype = kTypes[pick(random, 0, std::size(kTypes) - 1)];
  if (size == Size::kTiny || chance(random, 0.4)) {
    const std::size_t rank = pick(random, 0, 4);
    info.shape = Shape::zeros(rank);
    for (std::size_t i = 0; i < rank; ++i)
      info.shape[i] = pick(random, chance(random, 0.02) ? 0 : 1, 9);
    return info;
  }
  // More than kWholeTensorTileBytes; a multiple of 16 in the last dimension most of the time.
  const std::uint64_t element_bytes = dtype_size_bytes(info.dtype);
  const std::uint64_t bytes =
      size == Size::kBanded ? pick(random, 1 << 20, 3 << 20) : pick(random, 66 << 10, 160 << 10);
  const std::size_t rank = pick(random, 1, 4);
  info.shape = Shape::zeros(rank);
  std::uint64_t left = bytes / element_bytes;
  for (std::size_t i = rank; i-- > 1;) {
    std::uint64_t extent = i + 1 == rank ? 16 * pick(random, 4, 40) : pick(random, 1, 6);
    if (i + 1 == rank && chance(random, 0.2)) ++extent;
    info.shape[i] = std::min(extent, left);
    left = std::max<std::uint64_t>(1, left / info.shape[i]);
  }
  info.shape[0] = left + 1;
  return info;
}

// [0, extent) in `parts` pieces, at places that tiles know nothing of.
std::vector<std::uint64_t> random_cuts(Random& random, std::uint64_t extent, std::uint64_t parts) {
  std::vector<std::uint64_t> cuts{0, extent};
  for (std::uint64_t i = 1; i < parts; ++i) {
    // Equal parts as often as odd ones.
    cuts.push_back(chance(random, 0.5) ? extent * i / parts : pick(random, 0, extent));
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

void random_boxes(Random& random, const Shape& shape, double keep, std::vector<Box>& out) {
  std::vector<Box> boxes{Box::whole(shape)};
  if (boxes[0].empty() || chance(random, 0.4)) {
    if (chance(random, keep)) out.push_back(boxes[0]);
    return;
  }
  for (std::size_t axis = 0; axis < shape.rank(); ++axis) {
    if (chance(random, 0.5)) continue;
    const auto cuts = random_cuts(random, shape[axis], pick(random, 2, 4));
    std::vector<Box> next;
    for (const Box& box : boxes) {
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        next.push_back(box);
        next.back().offset[axis] = cuts[i];
        next.back().extent[axis] = cuts[i + 1] - cuts[i];
      }
    }
    boxes = std::move(next);
  }
  for (const Box& box : boxes) {
    if (chance(random, keep)) out.push_back(box);
  }
}

// At random places of random segments.
std::unique_ptr<Layout> place_entries(Random& random, const TensorSet& tensors,
                                      std::vector<LayoutEntry> entries) {
  if (chance(random, 0.3)) std::shuffle(entries.begin(), entries.end(), random);
  const auto files = static_cast<std::uint32_t>(pick(random, 1, 3));
  std::vector<SegmentSpec> segments;
  for (std::uint32_t i = 0; i < files; ++i) {
    segments.push_back({"s" + std::to_string(i) + ".safetensors", 64});
  }
  for (LayoutEntry& entry : entries) {
    entry.segment = static_cast<std::uint32_t>(pick(random, 0, files - 1));
    SegmentSpec& segment = segments[entry.segment];
    if (chance(random, 0.2)) segment.size_bytes += 8 * pick(random, 1, 5);
    const std::uint64_t element_bytes = dtype_size_bytes(tensors[entry.tensor].dtype);
    segment.size_bytes = (segment.size_bytes + element_bytes - 1) / element_bytes * element_bytes;
    entry.offset_bytes = segment.size_bytes;
    segment.size_bytes += entry.box.elements() * element_bytes;
  }
  auto layout = Layout::create(tensors, std::move(segments), std::move(entries));
  if (!layout) ADD_FAILURE() << layout.error().message();
  return std::make_unique<Layout>(std::move(*layout));
}

std::unique_ptr<Layout> random_layout(Random& random, const TensorSet& tensors, double presence,
                                      double keep) {
  std::vector<LayoutEntry> entries;
  for (TensorIndex tensor = 0; tensor < tensors.size(); ++tensor) {
    if (!chance(random, presence)) continue;
    std::vector<Box> boxes;
    random_boxes(random, tensors[tensor].shape, keep, boxes);
    for (const Box& box : boxes) entries.push_back({tensor, box, 0, 0});
  }
  return place_entries(random, tensors, std::move(entries));
}

// Rank `rank` of `size`; tensor i is split along axis i % 2.
std::unique_ptr<Layout> shard_layout(Random& random, const TensorSet& tensors, std::uint64_t rank,
                                     std::uint64_t size) {
  std::vector<LayoutEntry> entries;
  for (TensorIndex tensor = 0; tensor < tensors.size(); ++tensor) {
    Box box = Box::whole(tensors[tensor].shape);
    const std::uint64_t extent = box.extent[tensor % 2];
    box.offset[tensor % 2] = extent * rank / size;
    box.extent[tensor % 2] = extent * (rank + 1) / size - extent * rank / size;
    entries.push_back({tensor, box, 0, 0});
  }
  return place_entries(random, tensors, std::move(entries));
}

std::unique_ptr<TileSet> random_tiles(Random& random, TileIndex count) {
  auto tiles = std::make_unique<TileSet>(count);
  const double density = static_cast<double>(pick(random, 1, 10)) / 10;
  // In runs, as pulls leave them.
  bool on = chance(random, density);
  for (TileIndex tile = 0; tile < count; ++tile) {
    if (chance(random, 0.3)) on = chance(random, density);
    if (on) tiles->set(tile);
  }
  return tiles;
}

}  // namespace

std::uint64_t pick(Random& random, std::uint64_t low, std::uint64_t high) {
  return low + random() % (high - low + 1);
}

bool chance(Random& random, double probability) {
  return static_cast<double>(random() >> 11) < probability * 9007199254740992.0;
}

std::shared_ptr<const Checkpoint> make_checkpoint(std::vector<TensorInfo> tensors) {
  auto set = TensorSet::create(std::move(tensors));
  if (!set) ADD_FAILURE() << set.error().message();
  auto map = TileMap::create(*set);
  if (!map) ADD_FAILURE() << map.error().message();
  return std::make_shared<const Checkpoint>(
      Checkpoint{{"m", 1}, std::move(*set), std::move(*map), {}, {}});
}

std::vector<SourceView> Scenario::views() const {
  std::vector<SourceView> views;
  for (const Source& source : sources) {
    views.push_back({layouts[source.layout].get(), source.held.get(), source.proves_parts});
  }
  return views;
}

Scenario random_scenario(Random& random, Size size) {
  Scenario scenario;
  std::vector<TensorInfo> tensors;
  const std::uint64_t count = size == Size::kTiny ? pick(random, 1, 12) : pick(random, 1, 3);
  for (std::uint64_t i = 0; i < count; ++i) tensors.push_back(random_tensor(random, i, size));
  scenario.checkpoint = make_checkpoint(std::move(tensors));
  const TensorSet& set = scenario.checkpoint->tensors;
  const TileIndex tiles = scenario.checkpoint->tiles.tile_count();

  const bool complete = chance(random, 0.6);  // most plans have nothing missing
  const bool has_tile_sets = !complete && chance(random, 0.6);
  scenario.destination = random_layout(random, set, 0.9, 0.8);
  const std::uint64_t layouts = pick(random, 1, 4);
  for (std::uint64_t i = 0; i < layouts; ++i) {
    const bool all = complete && i == 0;
    scenario.layouts.push_back(random_layout(random, set, all ? 1 : 0.8, all ? 1 : 0.7));
    const std::uint64_t copies = pick(random, 1, 2);
    for (std::uint64_t copy = 0; copy < copies; ++copy) {
      Scenario::Source& source = scenario.sources.emplace_back();
      source.layout = i;
      source.proves_parts = chance(random, 0.5);
      if ((has_tile_sets || !all) && chance(random, 0.5)) source.held = random_tiles(random, tiles);
    }
  }
  std::shuffle(scenario.sources.begin(), scenario.sources.end(), random);
  if (chance(random, 0.3)) scenario.have = random_tiles(random, tiles);

  PlanOptions& options = scenario.options;
  options.slice_bytes = pick(random, 1, 256 << 10);
  options.bucket_bytes = pick(random, 1, 2 << 20);
  options.max_partial_overhead = chance(random, 0.2) ? 1.0 : 2.0;
  if (chance(random, 0.5)) options.small_tile_bytes = 0;
  return scenario;
}

Scenario sharded_scenario(Random& random) {
  Scenario scenario;
  std::vector<TensorInfo> tensors;
  const std::uint64_t count = pick(random, 4, 60);
  for (std::uint64_t i = 0; i < count; ++i) {
    const Shape shape{pick(random, 1, 24), pick(random, 1, 24)};
    tensors.push_back({"t" + std::to_string(100 + i), kTypes[i % std::size(kTypes)], shape});
  }
  if (chance(random, 0.2)) tensors.push_back({"w", DType::kBF16, {pick(random, 20, 60), 1024}});
  scenario.checkpoint = make_checkpoint(std::move(tensors));
  const TensorSet& set = scenario.checkpoint->tensors;
  const std::uint64_t from = pick(random, 1, 6);
  const std::uint64_t to = chance(random, 0.5) ? 1 : pick(random, 2, 6);
  scenario.destination = shard_layout(random, set, pick(random, 0, to - 1), to);
  for (std::uint64_t rank = 0; rank < from; ++rank) {
    scenario.layouts.push_back(shard_layout(random, set, rank, from));
    scenario.sources.push_back({rank, nullptr, chance(random, 0.5)});
    if (chance(random, 0.3)) {
      scenario.sources.push_back(
          {rank, random_tiles(random, scenario.checkpoint->tiles.tile_count()), false});
    }
  }
  scenario.options.slice_bytes = pick(random, 1, 32 << 10);
  scenario.options.bucket_bytes = pick(random, 1, 128 << 10);
  if (chance(random, 0.3)) scenario.options.small_tile_bytes = 0;
  return scenario;
}

// Tiles of up to 256 KiB whose rows are whole chunks of the tile's tree.
Scenario large_shards_scenario(Random& random) {
  Scenario scenario;
  std::vector<TensorInfo> tensors;
  const std::uint64_t count = pick(random, 1, 2);
  for (std::uint64_t i = 0; i < count; ++i) {
    tensors.push_back({"t" + std::to_string(i), DType::kBF16, {pick(random, 64, 256), 8192}});
  }
  scenario.checkpoint = make_checkpoint(std::move(tensors));
  const TensorSet& set = scenario.checkpoint->tensors;
  const std::uint64_t from = pick(random, 2, 8);
  const std::uint64_t to = pick(random, 2, 16);
  scenario.destination = shard_layout(random, set, pick(random, 0, to - 1), to);
  for (std::uint64_t rank = 0; rank < from; ++rank) {
    scenario.layouts.push_back(shard_layout(random, set, rank, from));
    // Whatever a missing rank alone holds is missing, but a part of its tile may be proved.
    if (chance(random, 0.1)) continue;
    scenario.sources.push_back({rank, nullptr, chance(random, 0.8)});
  }
  scenario.options.slice_bytes = pick(random, 64 << 10, 512 << 10);
  scenario.options.bucket_bytes = 2 << 20;
  return scenario;
}

}  // namespace rekindle::planner::testing
