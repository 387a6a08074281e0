#include "transport/verbs/memory/piece_plan.h"

#include <algorithm>
#include <bit>

namespace rekindle::transport::verbs {
namespace {

constexpr int kUnknownNode = -1;

// A region may end at the end of the address space. So an offset is compared with the rest before
// it grows. Addresses may wrap, which does not change their remainder by a power of two.
std::uint64_t past_border(std::uint64_t address, std::uint64_t alignment) {
  return address & (alignment - 1);
}

// The end of the run of blocks on one node that begins at `offset`.
std::uint64_t run_end(std::uint64_t address, std::uint64_t bytes, std::uint64_t offset,
                      std::uint64_t alignment, const CutRules& rules) {
  if (!rules.node_at) return bytes;
  int run_node = rules.node_at(address + offset);
  while (true) {
    const std::uint64_t block = alignment - past_border(address + offset, alignment);
    if (block >= bytes - offset) return bytes;
    const int node = rules.node_at(address + offset + block);
    if (node != kUnknownNode && run_node != kUnknownNode && node != run_node) return offset + block;
    if (run_node == kUnknownNode) run_node = node;
    offset += block;
  }
}

}  // namespace

std::vector<Cut> plan_pieces(std::uint64_t address, std::uint64_t bytes, const CutRules& rules) {
  const std::uint64_t max_bytes = std::max<std::uint64_t>(rules.max_bytes, 1);
  const std::uint64_t alignment = std::bit_floor(std::max<std::uint64_t>(rules.alignment, 1));
  // Pieces that are smaller than the alignment are as aligned as their size allows.
  const std::uint64_t fine = std::min(alignment, std::bit_floor(max_bytes));
  std::vector<Cut> cuts;
  std::uint64_t offset = 0;
  while (offset < bytes) {
    const std::uint64_t end = run_end(address, bytes, offset, alignment, rules);
    while (offset < end) {
      std::uint64_t take = std::min(max_bytes, end - offset);
      if (take < end - offset) {
        const std::uint64_t over = past_border(address + offset + take, fine);
        if (over < take) take -= over;
      }
      cuts.push_back({offset, take});
      offset += take;
    }
  }
  return cuts;
}

}  // namespace rekindle::transport::verbs
