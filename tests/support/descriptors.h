#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <system_error>

#include <sys/types.h>

namespace rekindle::testing {

// Of a process that runs; 0 when it has gone.
inline std::size_t open_descriptors(pid_t pid) {
  std::size_t count = 0;
  std::error_code gone;
  std::filesystem::directory_iterator item("/proc/" + std::to_string(pid) + "/fd", gone);
  for (; !gone && item != std::filesystem::directory_iterator(); item.increment(gone)) ++count;
  return count;
}

}  // namespace rekindle::testing
