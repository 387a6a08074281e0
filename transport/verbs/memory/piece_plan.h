#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace rekindle::transport::verbs {

// [offset, offset + bytes) of a region.
struct Cut {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  bool operator==(const Cut&) const = default;
};

struct CutRules {
  std::uint64_t max_bytes = std::uint64_t{1} << 30;  // device maximum and piece size, the smaller
  std::uint64_t alignment = 2 << 20;  // borders lie on multiples of it (of the address)
  // The NUMA node of the page at this address; -1: unknown. Called once per `alignment`. Without
  // this function there are no cuts by node.
  std::function<int(std::uint64_t address)> node_at;
};

// The pieces in which a region of `bytes` at `address` is registered: complete, in order, and each
// on one NUMA node as far as is known. Pure.
std::vector<Cut> plan_pieces(std::uint64_t address, std::uint64_t bytes, const CutRules& rules);

}  // namespace rekindle::transport::verbs
