#pragma once

#include <filesystem>
#include <functional>

#include <sys/stat.h>

#include "src/base/result.h"

// The directories and symbolic links through which a path leads. Whoever owns one of them can lead
// the path elsewhere, whatever the mode says.
namespace rekindle {

// The owner is neither root nor this user. In a user namespace, files of users outside it seem to
// belong to one unknown user, which does not count as foreign.
bool is_foreign(const struct stat& status);

// Calls `check` for each of them from the root on, in the order in which the kernel follows them,
// until one gives an error. What is at the end of the path is none of them, unless it is a link.
// What does not exist ends the way.
using WayCheck = std::function<Result<void>(const std::filesystem::path&, const struct stat&)>;
Result<void> check_way(const std::filesystem::path& path, const WayCheck& check);

}  // namespace rekindle
