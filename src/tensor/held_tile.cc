#include "src/tensor/held_tile.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "src/base/blake3.h"

namespace rekindle {

namespace {

// A proof is worth its memory where it is short beside the part that it proves.
constexpr std::uint64_t kPartBytesPerProofByte = 64;

// The place of a tile in its tensor, and the part of it that the layout holds.
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

std::uint64_t held_elements(std::span<const LayoutEntry> entries, const Box& box) {
  std::uint64_t held = 0;
  for (const LayoutEntry& entry : entries) {
    if (const auto part = intersect(entry.box, box)) held += part->elements();
  }
  return held;
}

bool holds_whole(const Place& place) {
  return held_elements(place.entries, place.box) == place.box.elements();
}

std::byte* tile_scratch() {
  thread_local const auto bytes = std::make_unique<std::byte[]>(kMaxTileBytes);
  return bytes.get();
}

void gather_tile(const Place& place, const ArrayOf& array_of, std::byte* out) {
  for (const LayoutEntry& entry : place.entries) {
    const auto part = intersect(entry.box, place.box);
    if (!part) continue;
    const std::uint64_t bytes = place.box.elements() * place.element_bytes();
    copy_box(*part, array_of(entry), entry.box, {out, bytes}, place.box, place.element_bytes());
  }
}

// A tile whose parts lie in several arrays is put together first.
Digest digest_spread_tile(const Place& place, const ArrayOf& array_of) {
  gather_tile(place, array_of, tile_scratch());
  return blake3({tile_scratch(), place.box.elements() * place.element_bytes()});
}

Digest digest_held(const Place& place, const ArrayOf& array_of) {
  thread_local std::vector<HeldBox> parts;
  parts.clear();
  for (const LayoutEntry& entry : place.entries) {
    if (const auto part = intersect(entry.box, place.box)) {
      parts.push_back({*part, array_of(entry), entry.box});
    }
  }
  return digest_parts(parts, place.element_bytes());
}

std::optional<Digest> digest_whole(const Place& place, const ArrayOf& array_of) {
  for (const LayoutEntry& entry : place.entries) {
    if (contains(entry.box, place.box)) {
      return digest_box(place.box, place.element_bytes(), array_of(entry), entry.box);
    }
  }
  if (!holds_whole(place)) return std::nullopt;
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

std::vector<KeptProof> kept_proofs(std::span<const LayoutEntry> entries, const Box& tile,
                                   std::uint64_t element_bytes) {
  std::vector<KeptProof> proofs;
  const std::uint64_t tile_elements = tile.elements();
  std::uint64_t held = 0;
  std::uint64_t bytes = 0;
  for (const LayoutEntry& entry : entries) {
    const auto part = intersect(entry.box, tile);
    if (!part) continue;
    held += part->elements();
    if (!is_one_run(*part, tile)) return {};
    KeptProof proof{&entry, *part, range_in_tile(*part, tile, element_bytes), bytes, 0};
    proof.bytes = proof_bytes(proof.range, tile_elements * element_bytes);
    bytes += proof.bytes;
    proofs.push_back(proof);
  }
  const bool worth_it = bytes * kPartBytesPerProofByte <= held * element_bytes;
  if (held == tile_elements || !worth_it) return {};
  return proofs;
}

std::vector<KeptProof> kept_proofs(const Checkpoint& checkpoint, const Layout& layout,
                                   TileIndex tile) {
  const Place place = place_of(checkpoint, layout, tile);
  return kept_proofs(place.entries, place.box, place.element_bytes());
}

std::uint64_t total_bytes(std::span<const KeptProof> proofs) {
  return proofs.empty() ? 0 : proofs.back().offset + proofs.back().bytes;
}

bool LayoutTiles::is_partial(TileIndex tile) const {
  return std::binary_search(partial.begin(), partial.end(), tile);
}

LayoutTiles tiles_of_layout(const Checkpoint& checkpoint, const Layout& layout) {
  LayoutTiles tiles{TileSet(checkpoint.tiles.tile_count()), {}, {0}};
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
      if (holds_whole(place)) continue;
      tiles.partial.push_back(tile);
      tiles.proofs_begin.push_back(
          tiles.proofs_begin.back() +
          total_bytes(kept_proofs(place.entries, place.box, place.element_bytes())));
    }
  }
  return tiles;
}

Digest part_digest(const Checkpoint& checkpoint, const Layout& layout, TileIndex tile,
                   const ArrayOf& array_of) {
  return digest_held(place_of(checkpoint, layout, tile), array_of);
}

Result<Digest> whole_tile_digest(const Checkpoint& checkpoint, const Layout& layout, TileIndex tile,
                                 const ArrayOf& array_of) {
  const Place place = place_of(checkpoint, layout, tile);
  if (const auto digest = digest_whole(place, array_of)) return *digest;
  return fail(ErrorCode::kNotFound, "tensor '{}' tile {} is not held whole", place.info->name,
              place.local);
}

bool read_tile(const Checkpoint& checkpoint, const Layout& layout, TileIndex tile,
               const ArrayOf& array_of, std::span<std::byte> out) {
  const Place place = place_of(checkpoint, layout, tile);
  if (!holds_whole(place)) return false;
  gather_tile(place, array_of, out.data());
  return true;
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
  if (digest_held(place, array_of) == known->digest) return {};
  return corrupt_tile(manifest, place, "its bytes do not match the digest made when they came");
}

}  // namespace rekindle
