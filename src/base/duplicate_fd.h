#pragma once

#include <cerrno>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle {

// Another descriptor of the same open file. `purpose` begins the message of an error: "share a
// page".
inline Result<UniqueFd> duplicate(int fd, std::string_view purpose) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) return fail_errno(errno, purpose);
  return copy;
}

// One for each, or none.
inline Result<std::vector<UniqueFd>> duplicate_all(std::span<const UniqueFd> files,
                                                   std::string_view purpose) {
  std::vector<UniqueFd> copies;
  for (const UniqueFd& file : files) {
    TRY(auto copy, duplicate(file.get(), purpose));
    copies.push_back(std::move(copy));
  }
  return copies;
}

}  // namespace rekindle
