#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include <sys/types.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

// Files below a directory that was opened once. No part of a name is followed if it is a symbolic
// link, so somebody who plants or swaps one cannot lead a write elsewhere.
namespace rekindle {

// The directory itself may be reached through links: the caller has named it.
Result<UniqueFd> open_directory(const std::filesystem::path& path);
// `name` is relative. `flags` and `mode` are those of open(2). kDenied: a part of it is a link.
Result<UniqueFd> open_beneath(int directory, const std::string& name, int flags, mode_t mode = 0);
// Makes the directory `name` where there is none, and opens it.
Result<UniqueFd> make_beneath(int directory, const std::string& name);
// A new file of mode 0644 under a new name, which then replaces `name`, be it a file or a link.
// `name` has one part.
Result<void> replace_beneath(int directory, const std::string& name, std::string_view content);
// For functions that take a path.
std::filesystem::path path_of(int directory);

}  // namespace rekindle
