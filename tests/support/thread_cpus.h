#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "src/base/numa_nodes.h"

namespace rekindle::testing {

// The CPUs that each thread of this process may use, by the thread's name.
inline std::multimap<std::string, std::vector<int>> cpus_of_threads() {
  std::multimap<std::string, std::vector<int>> threads;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      const std::string key = "Cpus_allowed_list:\t";
      if (line.starts_with(key)) threads.emplace(name, parse_cpu_list(line.substr(key.size())));
    }
  }
  return threads;
}

}  // namespace rekindle::testing
