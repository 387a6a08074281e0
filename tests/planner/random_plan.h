#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "recovery/planner/slice_plan.h"

namespace rekindle::planner::testing {

using Random = std::mt19937_64;

std::uint64_t pick(Random& random, std::uint64_t low, std::uint64_t high);  // both inclusive
bool chance(Random& random, double probability);

std::shared_ptr<const Checkpoint> make_checkpoint(std::vector<TensorInfo> tensors);

// A whole pull to plan: everything it refers to, owned.
struct Scenario {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::unique_ptr<Layout> destination;
  std::vector<std::unique_ptr<Layout>> layouts;
  struct Source {
    std::size_t layout = 0;
    std::unique_ptr<TileSet> held;
    bool proves_parts = false;
  };
  std::vector<Source> sources;
  std::unique_ptr<TileSet> have;
  PlanOptions options;

  std::vector<SourceView> views() const;
};

enum class Size { kTiny, kTiled, kBanded };
Scenario random_scenario(Random& random, Size size);
// Many tensors in shards of one tensor-parallel degree, wanted as a shard of another.
Scenario sharded_scenario(Random& random);
// The same with large tiles, which the shards cut and may keep proofs of.
Scenario large_shards_scenario(Random& random);

}  // namespace rekindle::planner::testing
