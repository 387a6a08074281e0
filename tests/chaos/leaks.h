#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <sys/types.h>

namespace rekindle::testing::chaos {

// What a process holds.
struct Holdings {
  int descriptors = 0;
  int mappings = 0;  // of files and memfds; the allocator's come and go by themselves
  int threads = 0;
};
Holdings holdings_of(pid_t pid);

// Paths below a store that only work in progress may have: half-done copies, staging.
std::vector<std::string> unfinished_files(const std::filesystem::path& store);

// Command lines of living processes that name this path.
std::vector<std::string> processes_that_name(const std::filesystem::path& path);

}  // namespace rekindle::testing::chaos
