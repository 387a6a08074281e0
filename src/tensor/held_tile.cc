#include "src/tensor/held_tile.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

namespace rekindle {

namespace {

// Where a tile lies in its tensor, and what of it the layout holds.
struct Place {
  TensorIndex tensor = 0;
  std::uint64_t local = 0;  // index of the tile in the tensor
  Box box;
  const TensorInfo* info = nullptr;
  std::span<const LayoutEntry> entries;

  std::uint64_t element_bytes() const { return dtype_size_bytes(info->dtype); }
};

Place place_of(const Checkpoint& checkpoint, const Layout& layout, TileIndex tile) {
  Place place;
  place.tensor = checkpoint.tiles.tensor_of(tile);
  place.local = tile - checkpoint.tiles.first_tile(place.tensor);
  place.box = checkpoint.tiles.grid(place.tensor).tile_box(place.local);
  place.info = &checkpoint.tensors[place.tensor];
  place.entries = layout.entries_of(place.tensor);
  return place;
}

std::uint64_t held_elements(const Place& place) {
  std::uint64_t held = 0;
  for (const LayoutEntry& entry : place.entries) {
    if (const auto part = intersect(entry.box, place.box)) held += part->elements();
  }
  return held;
}

std::byte* scratch() {
  thread_local const auto bytes = std::make_unique<std::byte[]>(kMaxTileBytes);
  return bytes.get();
}

// A tile whose parts lie in several arrays is put together first.
std::uint64_t digest_spread_tile(const Place& place, const ArrayOf& array_of) {
  std::byte* const tile = scratch();
  thread_local std::vector<StridedCopy> copies;
  for (const LayoutEntry& entry : place.entries) {
    const auto part = intersect(entry.box, place.box);
    if (!part) continue;
    copies.clear();
    strided_copies(*part, entry.box, place.box, place.element_bytes(), copies);
    const std::byte* const array = array_of(entry).data();
    for (const StridedCopy& copy : copies) {
      for (std::uint64_t i = 0; i < copy.count; ++i) {
        std::memcpy(tile + copy.dst_offset + i * copy.dst_stride,
                    array + copy.src_offset + i * copy.src_stride, copy.run_bytes);
      }
    }
  }
  return xxh3_64({tile, place.box.elements() * place.element_bytes()},
                 tile_seed(place.tensor, place.local));
}

std::uint64_t digest_parts(const Place& place, const ArrayOf& array_of) {
  constexpr std::uint64_t kPartSeed = 0x7061727473656564;  // parts never look like whole tiles
  std::uint64_t digest = tile_seed(place.tensor, place.local) ^ kPartSeed;
  for (const LayoutEntry& entry : place.entries) {
    if (const auto part = intersect(entry.box, place.box)) {
      digest = digest_box(*part, place.element_bytes(), digest, array_of(entry), entry.box);
    }
  }
  return digest;
}

std::optional<std::uint64_t> digest_whole(const Place& place, const ArrayOf& array_of) {
  for (const LayoutEntry& entry : place.entries) {
    if (contains(entry.box, place.box)) {
      return digest_box(place.box, place.element_bytes(), tile_seed(place.tensor, place.local),
                        array_of(entry), entry.box);
    }
  }
  if (held_elements(place) != place.box.elements()) return std::nullopt;
  return digest_spread_tile(place, array_of);
}

Failure corrupt_tile(const Manifest& manifest, const Place& place, std::string_view why) {
  for (const LayoutEntry& entry : place.entries) {
    const auto part = intersect(entry.box, place.box);
    if (!part) continue;
    std::vector<StridedCopy> copies;
    strided_copies({part->offset,
                    [&] {
                      Dims one = part->extent;
                      for (std::size_t i = 0; i < one.rank(); ++i) one[i] = 1;
                      return one;
                    }()},
                   entry.box, entry.box, place.element_bytes(), copies);
    return fail(ErrorCode::kCorrupt, "tensor '{}' tile {} {} at offset {} of {}: {}",
                place.info->name, place.local, place.box.to_string(),
                entry.offset_bytes + copies.front().src_offset,
                manifest.layout.segments()[entry.segment].name, why);
  }
  return fail(ErrorCode::kNotFound, "tensor '{}' tile {} is not held", place.info->name,
              place.local);
}

}  // namespace

bool LayoutTiles::is_partial(TileIndex tile) const {
  return std::binary_search(partial.begin(), partial.end(), tile);
}

LayoutTiles tiles_of_layout(const Checkpoint& checkpoint, const Layout& layout) {
  LayoutTiles tiles{TileSet(checkpoint.tiles.tile_count()), {}};
  std::vector<std::uint64_t> touched;
  for (TensorIndex tensor = 0; tensor < checkpoint.tensors.size(); ++tensor) {
    const auto entries = layout.entries_of(tensor);
    const TileIndex first = checkpoint.tiles.first_tile(tensor);
    if (entries.size() == 1 && entries[0].box == Box::whole(checkpoint.tensors[tensor].shape)) {
      tiles.held.set_range(first, checkpoint.tiles.first_tile(tensor + 1));
      continue;
    }
    touched.clear();
    for (const LayoutEntry& entry : entries) {
      checkpoint.tiles.grid(tensor).tiles_of(entry.box, touched);
    }
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    for (const std::uint64_t local : touched) {
      const auto tile = static_cast<TileIndex>(first + local);
      tiles.held.set(tile);
      const Place place = place_of(checkpoint, layout, tile);
      if (held_elements(place) != place.box.elements()) tiles.partial.push_back(tile);
    }
  }
  return tiles;
}

std::uint64_t part_digest(const Checkpoint& checkpoint, const Layout& layout, TileIndex tile,
                          const ArrayOf& array_of) {
  return digest_parts(place_of(checkpoint, layout, tile), array_of);
}

Result<std::uint64_t> whole_tile_digest(const Checkpoint& checkpoint, const Layout& layout,
                                        TileIndex tile, const ArrayOf& array_of) {
  const Place place = place_of(checkpoint, layout, tile);
  if (const auto digest = digest_whole(place, array_of)) return *digest;
  return fail(ErrorCode::kNotFound, "tensor '{}' tile {} is not held whole", place.info->name,
              place.local);
}

Result<void> verify_tile(const Manifest& manifest, TileIndex tile, const ArrayOf& array_of) {
  const Checkpoint& checkpoint = *manifest.checkpoint;
  const Place place = place_of(checkpoint, manifest.layout, tile);
  if (const auto digest = digest_whole(place, array_of)) {
    if (*digest == checkpoint.tile_digests[tile]) return {};
    return corrupt_tile(manifest, place, "its bytes do not match the published digest");
  }
  const auto known =
      std::lower_bound(manifest.part_digests.begin(), manifest.part_digests.end(), tile,
                       [](const PartDigest& part, TileIndex wanted) { return part.tile < wanted; });
  if (known == manifest.part_digests.end() || known->tile != tile) {
    return corrupt_tile(manifest, place, "the manifest has no digest for this part of the tile");
  }
  if (digest_parts(place, array_of) == known->digest) return {};
  return corrupt_tile(manifest, place, "its bytes do not match the digest made when they came");
}

Result<std::uint64_t> digest_verified_box(const Manifest& manifest, TileIndex tile, const Box& box,
                                          const ArrayOf& array_of) {
  if (tile >= manifest.checkpoint->tiles.tile_count()) {
    return fail(ErrorCode::kInvalid, "tile {} of {}", tile,
                manifest.checkpoint->tiles.tile_count());
  }
  const Place place = place_of(*manifest.checkpoint, manifest.layout, tile);
  TRY_VOID(check_box(box, place.info->shape));
  if (box.empty() || !contains(place.box, box)) {
    return fail(ErrorCode::kInvalid, "box {} of tensor '{}' is not inside tile {}", box.to_string(),
                place.info->name, place.local);
  }
  for (const LayoutEntry& entry : place.entries) {
    if (!contains(entry.box, box)) continue;
    TRY_VOID(verify_tile(manifest, tile, array_of));
    return digest_box(box, place.element_bytes(), tile_seed(place.tensor, place.local),
                      array_of(entry), entry.box);
  }
  return fail(ErrorCode::kNotFound, "box {} of tensor '{}' is not held in one piece",
              box.to_string(), place.info->name);
}

}  // namespace rekindle
