#pragma once

#include <filesystem>

#include "src/base/result.h"

// Directories that survive a power cut. The entry of a new directory is on the disk only after an
// fsync of the directory above it. Until then a power cut may lose the new directory with all its
// synced files.
namespace rekindle {

// Creates `path` with mode 0700, and the directories above it that are missing, and syncs every
// directory that got an entry. If `path` exists, the directory above it is synced as well, because
// the process that made the entry may have been killed before its sync.
Result<void> make_directory_durably(const std::filesystem::path& path);

}  // namespace rekindle
