#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "src/base/numa_nodes.h"
#include "src/base/result.h"

// The NUMA nodes of the pages of segment files. docs/internals/store.md says why they matter, and
// which nodes are chosen.
namespace rekindle::store {

struct NumaPolicy {
  enum class Kind {
    kAuto,  // the node that the maker of a segment prefers, else `node`, else as kInterleave
    kInterleave,
    kLocal,
    kNode,
  };
  Kind kind = Kind::kAuto;
  int node = -1;  // of kNode; of kAuto: that of the NICs, -1 if there are several or none is known
  bool operator==(const NumaPolicy&) const = default;
};
// "auto", "interleave", "local" or the number of a node.
Result<NumaPolicy> parse_numa(std::string_view text);

// Tells the kernel where the pages of files shall be. Thread-safe once choose() has returned.
class NumaPlacement {
 public:
  NumaPlacement() = default;  // where they are touched first
  NumaPlacement(const NumaPlacement&) = delete;
  NumaPlacement& operator=(const NumaPlacement&) = delete;

  // kInvalid: a node without memory. Nothing is asked of a kernel that has one node only.
  Result<void> choose(const NumaPolicy& policy, std::span<const NumaNode> nodes);
  // The nodes of a file whose maker prefers none. Empty: of the first touch.
  std::span<const int> nodes() const { return nodes_; }

  // The node of a file whose maker prefers this one (-1: none). -1: several nodes, or that of the
  // first touch.
  int node_for(int preferred) const;
  // For file `number` of a reserve, whose later users are unknown: the nodes in turn.
  int preferred_in_turn(std::uint64_t number) const;

  // For pages of the file that are not allocated yet, also if another process touches them first.
  // `mapping` is shared, of the whole file, on tmpfs. False: nothing was chosen, or the kernel
  // refuses, for which this logs one warning. The pages then come from any node.
  bool apply(std::span<std::byte> mapping, int preferred_node = -1) const;

 private:
  std::vector<int> nodes_;     // empty: first touch
  std::vector<int> possible_;  // that makers may prefer; empty: what they prefer does not count
  mutable std::atomic<bool> refused_ = false;
};

}  // namespace rekindle::store
