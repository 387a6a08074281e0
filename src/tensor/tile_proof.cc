#include "src/tensor/tile_proof.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "src/base/blake3.h"

namespace rekindle {

namespace {

// A subtree of the tile's tree: chunks [begin, end).
struct Node {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  // The left child has the largest power of two of chunks that leaves some for the right one.
  std::uint64_t middle() const { return begin + std::bit_floor(end - begin - 1); }
  Node left() const { return {begin, middle()}; }
  Node right() const { return {middle(), end}; }
};

// The chunks that a range touches, in a tile of `bytes` bytes.
struct Cover {
  Cover(TileRange range, std::uint64_t bytes)
      : top{0, std::max<std::uint64_t>(1, (bytes + kBlake3ChunkBytes - 1) / kBlake3ChunkBytes)},
        chunks{range.begin / kBlake3ChunkBytes,
               (range.end + kBlake3ChunkBytes - 1) / kBlake3ChunkBytes},
        begin(chunks.begin * kBlake3ChunkBytes),
        end(std::min(bytes, chunks.end * kBlake3ChunkBytes)) {}

  bool beside(const Node& node) const {
    return node.end <= chunks.begin || node.begin >= chunks.end;
  }
  bool within(const Node& node) const {
    return node.begin >= chunks.begin && node.end <= chunks.end;
  }

  Node top;
  Node chunks;
  std::uint64_t begin;  // bytes, at borders of chunks
  std::uint64_t end;
};

Digest value_of(std::span<const std::byte> bytes, const Node& node) {
  return blake3_subtree(bytes, node.begin);
}

void add_nodes(const Cover& cover, std::span<const std::byte> tile, const Node& node,
               std::string& out) {
  if (cover.beside(node)) {
    const std::uint64_t begin = node.begin * kBlake3ChunkBytes;
    const std::uint64_t end = std::min<std::uint64_t>(tile.size(), node.end * kBlake3ChunkBytes);
    out += value_of(tile.subspan(begin, end - begin), node).to_bytes();
  } else if (!cover.within(node)) {
    add_nodes(cover, tile, node.left(), out);
    add_nodes(cover, tile, node.right(), out);
  }
}

// Computes the tree again from the covered bytes and the proof's nodes.
class Climber {
 public:
  Climber(const Cover& cover, std::span<const std::byte> covered, std::string_view nodes)
      : cover_(cover), covered_(covered), nodes_(nodes) {}

  Digest leaf() {
    if (cover_.within(cover_.top)) return blake3(covered_);
    return parent_of(cover_.top, true);
  }
  // Whether the proof had exactly the nodes that were needed.
  bool used_up() const { return !short_ && nodes_.empty(); }

 private:
  Digest value(const Node& node) {
    if (cover_.beside(node)) {
      short_ = short_ || nodes_.size() < sizeof(Digest);
      const Digest digest = Digest::from_bytes(nodes_.substr(0, sizeof(Digest)));
      nodes_.remove_prefix(std::min(nodes_.size(), sizeof(Digest)));
      return digest;
    }
    if (cover_.within(node)) {
      const std::uint64_t begin = node.begin * kBlake3ChunkBytes - cover_.begin;
      const std::uint64_t end = std::min(node.end * kBlake3ChunkBytes, cover_.end) - cover_.begin;
      return value_of(covered_.subspan(begin, end - begin), node);
    }
    return parent_of(node, false);
  }
  // The left child first: the proof's nodes come in this order.
  Digest parent_of(const Node& node, bool top) {
    const Digest left = value(node.left());
    const Digest right = value(node.right());
    return blake3_parent(left, right, top);
  }

  const Cover& cover_;
  const std::span<const std::byte> covered_;
  std::string_view nodes_;
  bool short_ = false;
};

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

std::string prove_range(std::span<const std::byte> tile, TileRange range) {
  const Cover cover(range, tile.size());
  const auto text = [&](std::uint64_t begin, std::uint64_t end) {
    return std::string(reinterpret_cast<const char*>(tile.data()) + begin, end - begin);
  };
  std::string proof = text(cover.begin, range.begin) + text(range.end, cover.end);
  add_nodes(cover, tile, cover.top, proof);
  return proof;
}

Result<Digest> leaf_by_proof(std::span<const std::byte> part, TileRange range,
                             std::uint64_t tile_bytes, std::string_view proof) {
  const auto bad = [&] {
    return fail(ErrorCode::kCorrupt,
                "a proof of {} bytes does not fit bytes {} to {} of a tile of {}", proof.size(),
                range.begin, range.end, tile_bytes);
  };
  if (range.begin >= range.end || range.end > tile_bytes ||
      part.size() != range.end - range.begin) {
    return bad();
  }
  const Cover cover(range, tile_bytes);
  const std::uint64_t head = range.begin - cover.begin;
  const std::uint64_t tail = cover.end - range.end;
  if (proof.size() < head + tail) return bad();
  std::vector<std::byte> covered(cover.end - cover.begin);
  std::memcpy(covered.data(), proof.data(), head);
  std::memcpy(covered.data() + head, part.data(), part.size());
  std::memcpy(covered.data() + head + part.size(), proof.data() + head, tail);
  Climber climber(cover, covered, proof.substr(head + tail));
  const Digest leaf = climber.leaf();
  if (!climber.used_up()) return bad();
  return leaf;
}

}  // namespace rekindle
