#include "src/tensor/tile_piece.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "src/base/blake3.h"
#include "src/tensor/tile.h"

namespace rekindle {

namespace {

// How the piece tells one run of a tile: its bytes up to `chunks`, the subtrees of those, and its
// bytes from there.
struct RunCode {
  RunCode(TileRange run, std::uint64_t tile_bytes) : top(ChunkNode::top(tile_bytes)) {
    chunks.begin = (run.begin + kBlake3ChunkBytes - 1) / kBlake3ChunkBytes;
    chunks.end = run.end == tile_bytes ? top.end : run.end / kBlake3ChunkBytes;
    if (chunks.begin >= chunks.end || top.is_chunk()) {
      chunks = {};
      head = run;
      tail = {run.end, run.end};
      return;
    }
    head = {run.begin, chunks.begin * kBlake3ChunkBytes};
    tail = {std::min(run.end, chunks.end * kBlake3ChunkBytes), run.end};
  }

  // The value of the tree's top would be the leaf itself, which is no value of a subtree.
  template <typename Visit>
  void for_each_subtree(const Visit& visit) const {
    if (chunks.begin == chunks.end) return;
    for_each_node_within(chunks, top.left(), visit);
    for_each_node_within(chunks, top.right(), visit);
  }
  std::uint64_t bytes() const {
    std::uint64_t total = head.end - head.begin + tail.end - tail.begin;
    for_each_subtree([&](const ChunkNode&) { total += sizeof(Digest); });
    return total;
  }

  ChunkNode top;
  ChunkNode chunks;  // whole in the run; empty if there is none
  TileRange head;
  TileRange tail;
};

// The bytes of a node.
TileRange range_of(const ChunkNode& node, std::uint64_t tile_bytes) {
  return {node.begin * kBlake3ChunkBytes, std::min(node.end * kBlake3ChunkBytes, tile_bytes)};
}

// Calls visit(run) for the runs of the part in the tile, in order.
template <typename Visit>
void for_each_run(const TilePart& part, const Visit& visit) {
  thread_local std::vector<StridedCopy> copies;
  copies.clear();
  strided_copies(part.box, part.tile, part.box, part.element_bytes, copies);
  for (const StridedCopy& copy : copies) {
    for (std::uint64_t i = 0; i < copy.count; ++i) {
      const std::uint64_t begin = copy.src_offset + i * copy.src_stride;
      visit(TileRange{begin, begin + copy.run_bytes});
    }
  }
}

std::span<std::byte> part_scratch(std::uint64_t bytes) {
  thread_local const auto scratch = std::make_unique<std::byte[]>(kMaxTileBytes);
  return {scratch.get(), bytes};
}

// The row-major bytes of the box: where they lie in `array`, or gathered.
std::span<const std::byte> packed_bytes(const TilePart& part, std::span<const std::byte> array,
                                        const Box& held) {
  if (is_one_run(part.box, held)) {
    const TileRange range = range_in_tile(part.box, held, part.element_bytes);
    return array.subspan(range.begin, range.end - range.begin);
  }
  const auto scratch = part_scratch(part.box.elements() * part.element_bytes);
  copy_box(part.box, array, held, scratch, part.box, part.element_bytes);
  return scratch;
}

char* append(char* to, std::span<const std::byte> bytes) {
  if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
  return to + bytes.size();
}

}  // namespace

std::uint64_t piece_bytes(const TilePart& part) {
  const std::uint64_t tile_bytes = part.tile.elements() * part.element_bytes;
  std::uint64_t total = 0;
  for_each_run(part, [&](TileRange run) { total += RunCode(run, tile_bytes).bytes(); });
  return total;
}

void make_piece(const TilePart& part, std::span<const std::byte> array, const Box& held,
                std::span<char> out) {
  const std::uint64_t tile_bytes = part.tile.elements() * part.element_bytes;
  if (part.box.empty()) return;
  std::span<const std::byte> left = packed_bytes(part, array, held);
  char* to = out.data();
  for_each_run(part, [&](TileRange run) {
    const RunCode code(run, tile_bytes);
    const auto bytes = [&](TileRange range) {
      return left.subspan(range.begin - run.begin, range.end - range.begin);
    };
    to = append(to, bytes(code.head));
    code.for_each_subtree([&](const ChunkNode& node) {
      const Digest value = blake3_subtree(bytes(range_of(node, tile_bytes)), node.begin);
      to = append(to, std::as_bytes(std::span(value.bytes)));
    });
    to = append(to, bytes(code.tail));
    left = left.subspan(run.end - run.begin);
  });
}

TileAssembly::TileAssembly(const Box& tile, std::uint64_t element_bytes)
    : tile_(tile), element_bytes_(element_bytes), tile_bytes_(tile.elements() * element_bytes) {}

Result<void> TileAssembly::add(const Box& part, std::string_view piece) {
  if (part.rank() != tile_.rank() || part.empty() || !contains(tile_, part)) {
    return fail(ErrorCode::kInvalid, "{} is no part of the tile {}", part.to_string(),
                tile_.to_string());
  }
  for (const Box& other : parts_) {
    if (intersect(part, other)) {
      return fail(ErrorCode::kInvalid, "the parts {} and {} of a tile overlap", part.to_string(),
                  other.to_string());
    }
  }
  const TilePart place{part, tile_, element_bytes_};
  if (const std::uint64_t needed = piece_bytes(place); piece.size() != needed) {
    return fail(ErrorCode::kCorrupt, "the piece of {} of the tile {} has {} bytes instead of {}",
                part.to_string(), tile_.to_string(), piece.size(), needed);
  }
  for_each_run(place, [&](TileRange run) { piece = add_run(run, piece); });
  parts_.push_back(part);
  known_bytes_ += part.elements() * element_bytes_;
  return {};
}

std::string_view TileAssembly::add_run(TileRange run, std::string_view piece) {
  const auto take = [&](std::uint64_t bytes) {
    const auto taken = piece.substr(0, bytes);
    piece.remove_prefix(bytes);
    return taken;
  };
  const RunCode code(run, tile_bytes_);
  add_bytes(code.head, take(code.head.end - code.head.begin));
  code.for_each_subtree([&](const ChunkNode& node) {
    subtrees_[node.begin] = {node.end, Digest::from_bytes(take(sizeof(Digest)))};
  });
  add_bytes(code.tail, take(code.tail.end - code.tail.begin));
  return piece;
}

void TileAssembly::add_bytes(TileRange range, std::string_view bytes) {
  while (range.begin < range.end) {
    const std::uint64_t index = range.begin / kBlake3ChunkBytes;
    const TileRange whole = range_of({index, index + 1}, tile_bytes_);
    const std::uint64_t end = std::min(range.end, whole.end);
    Chunk& chunk = chunks_[index];
    chunk.bytes.resize(whole.end - whole.begin);
    std::memcpy(chunk.bytes.data() + (range.begin - whole.begin), bytes.data(), end - range.begin);
    chunk.known += end - range.begin;
    bytes.remove_prefix(end - range.begin);
    range.begin = end;
  }
}

std::uint64_t TileAssembly::held_bytes() const {
  std::uint64_t total = subtrees_.size() * sizeof(Digest);
  for (const auto& [index, chunk] : chunks_) total += chunk.bytes.size();
  return total;
}

// nullopt: a part of the node is not known, or only a larger node is.
std::optional<Digest> TileAssembly::value(const ChunkNode& node) const {
  const auto subtree = subtrees_.find(node.begin);
  if (subtree != subtrees_.end() && subtree->second.end == node.end) return subtree->second.value;
  if (node.is_chunk()) {
    const auto chunk = chunks_.find(node.begin);
    if (chunk == chunks_.end() || !chunk->second.complete()) return std::nullopt;
    return blake3_subtree(as_bytes(chunk->second.bytes), node.begin);
  }
  const auto left = value(node.left());
  const auto right = left ? value(node.right()) : std::nullopt;
  if (!right) return std::nullopt;
  return blake3_parent(*left, *right, false);
}

Digest TileAssembly::leaf() const {
  const ChunkNode top = ChunkNode::top(tile_bytes_);
  if (top.is_chunk()) return blake3(as_bytes(chunks_.at(0).bytes));
  return blake3_parent(*value(top.left()), *value(top.right()), true);
}

// Appends bytes of one chunk, if all of that chunk is known.
bool TileAssembly::append_bytes(TileRange range, std::string& out) const {
  if (range.begin == range.end) return true;
  const std::uint64_t index = range.begin / kBlake3ChunkBytes;
  const auto chunk = chunks_.find(index);
  if (chunk == chunks_.end() || !chunk->second.complete()) return false;
  out.append(chunk->second.bytes, range.begin - index * kBlake3ChunkBytes, range.end - range.begin);
  return true;
}

Result<std::string> TileAssembly::proof(TileRange range) const {
  if (range.begin >= range.end || range.end > tile_bytes_) {
    return fail(ErrorCode::kInvalid, "bytes {} to {} are no range of a tile of {}", range.begin,
                range.end, tile_bytes_);
  }
  const ChunkNode top = ChunkNode::top(tile_bytes_);
  const ChunkNode chunks{range.begin / kBlake3ChunkBytes,
                         (range.end + kBlake3ChunkBytes - 1) / kBlake3ChunkBytes};
  std::string proof;
  bool known = append_bytes({chunks.begin * kBlake3ChunkBytes, range.begin}, proof) &&
               append_bytes({range.end, range_of(chunks, tile_bytes_).end}, proof);
  for_each_node_beside(chunks, top, [&](const ChunkNode& node) {
    const auto digest = known ? value(node) : std::nullopt;
    known = digest.has_value();
    if (known) proof += digest->to_bytes();
  });
  if (!known) {
    return fail(ErrorCode::kNotFound, "the pieces of the tile {} do not prove its bytes {} to {}",
                tile_.to_string(), range.begin, range.end);
  }
  return proof;
}

}  // namespace rekindle
