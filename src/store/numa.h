#pragma once

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"

// The NUMA nodes of the pages of segment files. docs/internals/store.md says why they matter, and
// which nodes are chosen.
namespace rekindle::store {

struct NumaPolicy {
  enum class Kind { kInterleave, kLocal, kNode };
  Kind kind = Kind::kInterleave;
  int node = 0;  // of kNode
  bool operator==(const NumaPolicy&) const = default;
};
// "interleave", "local" or the number of a node.
Result<NumaPolicy> parse_numa(std::string_view text);

struct MemoryNodes {
  std::vector<int> all;        // ascending
  std::vector<int> with_cpus;  // those that host memory is spread over: not GPU or CXL memory
};
// Of the directory that stands for /sys. Empty: it lists none.
MemoryNodes read_memory_nodes(const std::filesystem::path& sysfs);
// The same without those that this process may not use (cpusets).
MemoryNodes usable_memory_nodes();

std::string node_list(std::span<const int> nodes);  // "0-1, 4"

// Tells the kernel where the pages of files shall be. Thread-safe.
class NumaPlacement {
 public:
  NumaPlacement() = default;  // where they are touched first
  NumaPlacement(const NumaPlacement&) = delete;
  NumaPlacement& operator=(const NumaPlacement&) = delete;

  // kInvalid: a node without memory. Nothing is asked of a kernel that has one node only.
  Result<void> choose(const NumaPolicy& policy, const MemoryNodes& nodes);
  std::span<const int> nodes() const { return nodes_; }

  // For pages of the file that are not allocated yet, also if another process touches them first.
  // `mapping` is shared, of the whole file, on tmpfs. If the kernel refuses, this logs one warning,
  // and the pages come from any node.
  void apply(std::span<std::byte> mapping) const;

 private:
  int mode_ = 0;
  std::vector<int> nodes_;  // empty: first touch
  mutable std::atomic<bool> refused_ = false;
};

}  // namespace rekindle::store
