#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <fmt/format.h>

#include "src/base/unique_fd.h"

namespace rekindle::testing {

// The memory of a process that a core dump may have: all readable mappings but those that the
// process has excluded (`dd`).
class DumpedMemory {
 public:
  explicit DumpedMemory(pid_t pid) {
    std::ifstream maps(fmt::format("/proc/{}/smaps", pid));
    const UniqueFd memory(::open(fmt::format("/proc/{}/mem", pid).c_str(), O_RDONLY | O_CLOEXEC));
    std::uint64_t begin = 0, end = 0;
    bool readable = false;
    for (std::string line; std::getline(maps, line);) {
      unsigned long from = 0, to = 0;
      char mode = 0;
      if (std::sscanf(line.c_str(), "%lx-%lx %c", &from, &to, &mode) == 3) {
        begin = from, end = to, readable = mode == 'r';
      } else if (line.starts_with("VmFlags:")) {
        if ((line + " ").find(" dd ") != std::string::npos) {
          excluded_bytes_ += end - begin;
        } else if (readable) {
          read(memory.get(), begin, end);
        }
      }
    }
  }

  bool has(std::string_view bytes) const {
    return std::ranges::any_of(
        parts_, [&](const std::string& part) { return part.find(bytes) != std::string::npos; });
  }
  std::uint64_t excluded_bytes() const { return excluded_bytes_; }

 private:
  // Some mappings of the kernel, such as [vvar], cannot be read.
  void read(int fd, std::uint64_t begin, std::uint64_t end) {
    std::string part(end - begin, '\0');
    std::size_t size = 0;
    while (size < part.size()) {
      const ssize_t got =
          ::pread(fd, part.data() + size, part.size() - size, static_cast<off_t>(begin + size));
      if (got <= 0) break;
      size += static_cast<std::size_t>(got);
    }
    part.resize(size);
    if (size > 0) parts_.push_back(std::move(part));
  }

  std::vector<std::string> parts_;
  std::uint64_t excluded_bytes_ = 0;
};

}  // namespace rekindle::testing
