#pragma once

#include <filesystem>

#include "src/base/result.h"

// Directories that survive a power cut. The entry of a new directory is on the disk only after an
// fsync of the directory above it; until then the new directory and all that was synced in it may
// be lost together.
namespace rekindle {

// Creates `path` with mode 0700, and the directories above it that are missing, and syncs every
// directory that got an entry. When `path` is there already the directory above it is synced, too,
// because the process that made the entry may have been killed before it did so.
Result<void> make_directory_durably(const std::filesystem::path& path);

}  // namespace rekindle
