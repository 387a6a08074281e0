#include "recovery/agent/numa_choice.h"

#include <string>
#include <vector>

#include "src/base/numa_nodes.h"

namespace rekindle::agent {

int NumaChoice::node_for(const pull::PullRequest& request) const {
  if (request.shard.empty() && request.boxes.empty()) return -1;
  std::vector<int> nodes;
  for (const std::string& device : request.devices) {
    nodes.push_back(transport::verbs::node_of_gpu(topology_, proc_, device));
  }
  return common_node(nodes);
}

}  // namespace rekindle::agent
