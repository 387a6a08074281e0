#include "src/tensor/tile_proof.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/blake3.h"
#include "src/tensor/chunk_tree.h"

namespace rekindle {

namespace {

// The chunks that a range touches, in a tile of `bytes` bytes.
struct Cover {
  Cover(TileRange range, std::uint64_t bytes)
      : top(ChunkNode::top(bytes)),
        chunks{range.begin / kBlake3ChunkBytes,
               (range.end + kBlake3ChunkBytes - 1) / kBlake3ChunkBytes},
        begin(chunks.begin * kBlake3ChunkBytes),
        end(std::min(bytes, chunks.end * kBlake3ChunkBytes)) {}

  bool beside(const ChunkNode& node) const { return node.beside(chunks); }
  bool within(const ChunkNode& node) const { return node.within(chunks); }

  ChunkNode top;
  ChunkNode chunks;
  std::uint64_t begin;  // bytes, at borders of chunks
  std::uint64_t end;
};

Digest value_of(std::span<const std::byte> bytes, const ChunkNode& node) {
  return blake3_subtree(bytes, node.begin);
}

// Calls visit(node) for each node beside the path from the covered chunks to the top, in the order
// of a proof.
template <typename Visit>
void for_each_node_beside(const Cover& cover, const Visit& visit) {
  rekindle::for_each_node_beside(cover.chunks, cover.top, visit);
}

// All that is known of a tile from a part of it and that part's proof: the bytes of the chunks that
// the part touches, and the nodes beside them. That is enough for the leaf, and for every node
// beside a smaller part.
class KnownTile {
 public:
  // nullopt: the proof does not have the length that the part needs.
  static std::optional<KnownTile> of(std::span<const std::byte> part, TileRange range,
                                     std::uint64_t tile_bytes, std::string_view proof) {
    if (range.begin >= range.end || range.end > tile_bytes ||
        part.size() != range.end - range.begin || proof.size() != proof_bytes(range, tile_bytes)) {
      return std::nullopt;
    }
    KnownTile known{Cover(range, tile_bytes), {}, {}, {}};
    const Cover& cover = known.cover_;
    const std::uint64_t head = range.begin - cover.begin;
    const std::uint64_t tail = cover.end - range.end;
    known.bytes_.resize(cover.end - cover.begin);
    std::memcpy(known.bytes_.data(), proof.data(), head);
    std::memcpy(known.bytes_.data() + head, part.data(), part.size());
    std::memcpy(known.bytes_.data() + head + part.size(), proof.data() + head, tail);
    proof.remove_prefix(head + tail);
    for_each_node_beside(cover, [&](const ChunkNode& node) {
      known.begins_.push_back(node.begin);
      known.digests_.push_back(Digest::from_bytes(proof.substr(0, sizeof(Digest))));
      proof.remove_prefix(sizeof(Digest));
    });
    return known;
  }

  Digest leaf() const {
    if (cover_.within(cover_.top)) return blake3(bytes_);
    return parent_of(cover_.top, true);
  }
  // Of a node that lies in the covered chunks, beside them, or above such nodes.
  Digest value(const ChunkNode& node) const {
    if (cover_.beside(node)) {
      const auto at = std::ranges::lower_bound(begins_, node.begin);
      return digests_[static_cast<std::size_t>(at - begins_.begin())];
    }
    if (!cover_.within(node)) return parent_of(node, false);
    const std::uint64_t begin = node.begin * kBlake3ChunkBytes;
    return value_of(bytes(begin, std::min(node.end * kBlake3ChunkBytes, cover_.end)), node);
  }
  // [begin, end) of the tile's bytes, in the covered chunks.
  std::span<const std::byte> bytes(std::uint64_t begin, std::uint64_t end) const {
    return std::span(bytes_).subspan(begin - cover_.begin, end - begin);
  }

 private:
  KnownTile(const Cover& cover, std::vector<std::byte> bytes, std::vector<std::uint64_t> begins,
            std::vector<Digest> digests)
      : cover_(cover),
        bytes_(std::move(bytes)),
        begins_(std::move(begins)),
        digests_(std::move(digests)) {}

  Digest parent_of(const ChunkNode& node, bool top) const {
    return blake3_parent(value(node.left()), value(node.right()), top);
  }

  Cover cover_;
  std::vector<std::byte> bytes_;
  // The nodes beside them: first chunks, ascending, and values.
  std::vector<std::uint64_t> begins_;
  std::vector<Digest> digests_;
};

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Failure wrong_length(TileRange range, std::uint64_t tile_bytes, std::string_view proof) {
  return fail(ErrorCode::kCorrupt,
              "a proof of {} bytes does not fit bytes {} to {} of a tile of {}", proof.size(),
              range.begin, range.end, tile_bytes);
}

}  // namespace

bool is_one_run(const Box& part, const Box& tile) {
  if (part.empty()) return false;
  std::size_t outer = 0;
  while (outer < part.rank() && part.extent[outer] == 1) ++outer;
  // Dimension `outer` may be cut; those behind it are whole.
  for (std::size_t i = outer + 1; i < part.rank(); ++i) {
    if (part.extent[i] != tile.extent[i]) return false;
  }
  return true;
}

TileRange range_in_tile(const Box& part, const Box& tile, std::uint64_t element_bytes) {
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < part.rank(); ++i) {
    first = first * tile.extent[i] + (part.offset[i] - tile.offset[i]);
  }
  return {first * element_bytes, (first + part.elements()) * element_bytes};
}

std::uint64_t proof_bytes(TileRange range, std::uint64_t tile_bytes) {
  const Cover cover(range, tile_bytes);
  std::uint64_t bytes = (range.begin - cover.begin) + (cover.end - range.end);
  for_each_node_beside(cover, [&](const ChunkNode&) { bytes += sizeof(Digest); });
  return bytes;
}

std::string prove_range(std::span<const std::byte> tile, TileRange range) {
  const Cover cover(range, tile.size());
  std::string proof(text_of(tile.subspan(cover.begin, range.begin - cover.begin)));
  proof += text_of(tile.subspan(range.end, cover.end - range.end));
  for_each_node_beside(cover, [&](const ChunkNode& node) {
    const std::uint64_t begin = node.begin * kBlake3ChunkBytes;
    const std::uint64_t end = std::min<std::uint64_t>(tile.size(), node.end * kBlake3ChunkBytes);
    proof += value_of(tile.subspan(begin, end - begin), node).to_bytes();
  });
  return proof;
}

Result<Digest> leaf_by_proof(std::span<const std::byte> part, TileRange range,
                             std::uint64_t tile_bytes, std::string_view proof) {
  const auto known = KnownTile::of(part, range, tile_bytes, proof);
  if (!known) return wrong_length(range, tile_bytes, proof);
  return known->leaf();
}

Result<std::string> prove_smaller_range(std::span<const std::byte> part, TileRange held,
                                        std::uint64_t tile_bytes, std::string_view proof,
                                        TileRange range) {
  const auto known = KnownTile::of(part, held, tile_bytes, proof);
  if (!known) return wrong_length(held, tile_bytes, proof);
  if (range.begin >= range.end || range.begin < held.begin || range.end > held.end) {
    return fail(ErrorCode::kInvalid, "bytes {} to {} of a tile are not in bytes {} to {}",
                range.begin, range.end, held.begin, held.end);
  }
  const Cover cover(range, tile_bytes);
  std::string smaller(text_of(known->bytes(cover.begin, range.begin)));
  smaller += text_of(known->bytes(range.end, cover.end));
  for_each_node_beside(cover,
                       [&](const ChunkNode& node) { smaller += known->value(node).to_bytes(); });
  return smaller;
}

void add_to_proof(std::span<char> proof, TileRange range, std::uint64_t tile_bytes,
                  std::string_view smaller, TileRange within) {
  const Cover cover(range, tile_bytes);
  const Cover part(within, tile_bytes);
  const std::uint64_t head = range.begin - cover.begin;
  const std::uint64_t tail = cover.end - range.end;
  const std::uint64_t part_head = within.begin - part.begin;
  if (within.begin == range.begin) std::memcpy(proof.data(), smaller.data(), head);
  if (within.end == range.end) {
    std::memcpy(proof.data() + head, smaller.data() + part_head, tail);
  }
  // Both lists ascend.
  std::vector<ChunkNode> wanted;
  for_each_node_beside(cover, [&](const ChunkNode& node) { wanted.push_back(node); });
  std::size_t next = 0;
  std::size_t from = part_head + (part.end - within.end);
  for_each_node_beside(part, [&](const ChunkNode& node) {
    while (next < wanted.size() && wanted[next].begin < node.begin) ++next;
    if (next < wanted.size() && wanted[next].begin == node.begin && wanted[next].end == node.end) {
      std::memcpy(proof.data() + head + tail + next * sizeof(Digest), smaller.data() + from,
                  sizeof(Digest));
    }
    from += sizeof(Digest);
  });
}

}  // namespace rekindle
