#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "src/base/blake3.h"

// The shape of the BLAKE3 tree over the chunks of a tile. Private to src/tensor: proofs and pieces
// of tiles name its nodes.
namespace rekindle {

// A subtree: chunks [begin, end).
struct ChunkNode {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  static ChunkNode top(std::uint64_t tile_bytes) {
    return {0,
            std::max<std::uint64_t>(1, (tile_bytes + kBlake3ChunkBytes - 1) / kBlake3ChunkBytes)};
  }
  bool is_chunk() const { return end - begin == 1; }
  bool within(const ChunkNode& chunks) const { return begin >= chunks.begin && end <= chunks.end; }
  bool beside(const ChunkNode& chunks) const { return end <= chunks.begin || begin >= chunks.end; }

  // The left child has the largest power of two of chunks that leaves some for the right one.
  std::uint64_t middle() const { return begin + std::bit_floor(end - begin - 1); }
  ChunkNode left() const { return {begin, middle()}; }
  ChunkNode right() const { return {middle(), end}; }
};

// Calls visit(node) for each largest node below `node` that has no chunk of `chunks`, in order.
template <typename Visit>
void for_each_node_beside(const ChunkNode& chunks, const ChunkNode& node, const Visit& visit) {
  if (node.beside(chunks)) return visit(node);
  if (node.within(chunks)) return;
  for_each_node_beside(chunks, node.left(), visit);
  for_each_node_beside(chunks, node.right(), visit);
}

// The same for each largest node that has no other chunks than `chunks`.
template <typename Visit>
void for_each_node_within(const ChunkNode& chunks, const ChunkNode& node, const Visit& visit) {
  if (node.within(chunks)) return visit(node);
  if (node.beside(chunks)) return;
  for_each_node_within(chunks, node.left(), visit);
  for_each_node_within(chunks, node.right(), visit);
}

}  // namespace rekindle
