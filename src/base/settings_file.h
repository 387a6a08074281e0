#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle {

// Files that a daemon reads when it starts, and again while it serves. Therefore only regular files
// are read: a FIFO or a device could make it wait for ever.

// kInvalid: it is no regular file. kDenied: a directory or a link on the way to it belongs to
// another user than root and ours.
Result<UniqueFd> open_settings_file(const std::filesystem::path& path);
// kDenied: users other than root and ours can read or change the open file. `what` names it.
Result<void> check_private_file(int fd, const std::string& what);

// kInvalid: it is no regular file, or has more than `most` bytes.
Result<std::string> read_settings_file(const std::filesystem::path& path, std::size_t most);
// The same of a file that says who is trusted. kDenied: users other than root, ours and its group
// can change it.
Result<std::string> read_trusted_file(const std::filesystem::path& path, std::size_t most);
// As read_trusted_file(), for files that a library reads.
Result<void> check_trusted_file(const std::filesystem::path& path);

}  // namespace rekindle
