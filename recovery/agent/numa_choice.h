#pragma once

#include <filesystem>
#include <utility>

#include "recovery/pull/pull_types.h"
#include "transport/verbs/host/topology.h"

namespace rekindle::agent {

// Chooses the NUMA node for the copy of a pull: that of the GPU that will read it, as far as this
// is known when the pull begins (docs/internals/store.md). Any thread.
class NumaChoice {
 public:
  // `proc`: the directory that stands for /proc.
  NumaChoice(transport::verbs::Topology topology, std::filesystem::path proc)
      : topology_(std::move(topology)), proc_(std::move(proc)) {}

  // -1: none. A whole version has none: workers on other GPUs may want it, too.
  int node_for(const pull::PullRequest& request) const;

 private:
  const transport::verbs::Topology topology_;
  const std::filesystem::path proc_;
};

}  // namespace rekindle::agent
