#pragma once

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"

// On which NUMA nodes the pages of segment files lie. Why it matters, and what is chosen:
// docs/internals/store.md.
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
// Of the directory that is /sys; empty where it has none.
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

  // For pages of the file that are not there yet, whoever touches them. `mapping`: all of it,
  // shared, on tmpfs. A kernel that refuses is warned of once; the pages come all the same.
  void apply(std::span<std::byte> mapping) const;

 private:
  int mode_ = 0;
  std::vector<int> nodes_;  // empty: first touch
  mutable std::atomic<bool> refused_ = false;
};

}  // namespace rekindle::store
