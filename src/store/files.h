#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

// Small file operations whose errors name the file. Private to the store.
namespace rekindle::store {

namespace fs = std::filesystem;

// The whole file; kInvalid above `max_bytes`.
Result<std::string> read_file(const fs::path& path, std::uint64_t max_bytes);
// The state of a replaced file after a power cut.
enum class AfterPowerCut {
  kWhole,     // it has the old bytes or the new ones
  kAnything,  // it may be empty or damaged, and its reader detects that
};
// Writes PATH.new, syncs it where it must be whole, and renames it to PATH: processes see the old
// bytes or the new ones.
Result<void> write_file_atomically(const fs::path& path, std::string_view bytes,
                                   AfterPowerCut after = AfterPowerCut::kWhole);
// pread until `out` is full; kCorrupt when the file ends before.
Result<void> read_exactly(int fd, std::span<std::byte> out, std::uint64_t offset,
                          const fs::path& path);

Result<void> rename_file(const fs::path& from, const fs::path& to);
Result<void> unlink_if_present(const fs::path& path);
Result<void> remove_tree(const fs::path& path);  // with its entries; does not follow links
Result<std::vector<fs::path>> entries_of(const fs::path& directory);  // sorted
Result<void> sync_directory(const fs::path& path);
Result<void> make_directory(const fs::path& path);  // mode 0700; an existing directory is fine

std::size_t store_threads();    // for work that is bound by memory and disks
bool is_memory_backed(int fd);  // tmpfs, ramfs or hugetlbfs: nothing to sync

}  // namespace rekindle::store
