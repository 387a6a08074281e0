#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"

namespace rekindle::transport::verbs {

// The contents of a topology file (docs/internals/verbs.md). Lists name ports ("mlx5_0" or
// "mlx5_0:1"), best first.
struct TopologyFile {
  struct Nic {
    std::string name;
    std::optional<int> numa_node;
    std::vector<int> cpus;  // empty: not given
  };
  struct Gpu {
    std::string bus_id;  // normalized
    std::optional<int> numa_node;
  };
  std::vector<Nic> nics;
  std::vector<Gpu> gpus;
  std::map<std::string, std::vector<std::string>, std::less<>> gpu_rails;
  std::map<int, std::vector<std::string>> node_rails;
  std::vector<std::string> any_rails;

  // kInvalid gives `name` and the place in the file. An unknown key is an error, too: an ignored
  // typing error would look like a slow network.
  static Result<TopologyFile> parse(std::string_view json, std::string_view name);
};

}  // namespace rekindle::transport::verbs
