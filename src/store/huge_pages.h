#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "src/base/result.h"

// Huge pages of tmpfs. The kernel faults in, maps, unmaps and pins 2 MiB at a time instead of 4
// KiB, if the mount allows it: a file cannot ask for them, and shmem_enabled does not apply to
// mounts.
namespace rekindle::store {

struct TmpfsMount {
  std::filesystem::path at;
  // The option `huge`: "never", "always", "within_size" or "advise".
  std::string huge = "never";
  bool gives_huge_pages() const { return huge != "never"; }
};

// The tmpfs on which `path` lies, by the lines of /proc/self/mountinfo. nullopt: it lies elsewhere.
std::optional<TmpfsMount> find_tmpfs(std::string_view mountinfo, const std::filesystem::path& path);

// Mounts a tmpfs with huge pages at `directory`, as large as the tmpfs below it, which stays until
// somebody unmounts it or the host restarts. Does nothing where files get huge pages already. The
// error's message says what to do: kDenied: not allowed to mount. kInvalid: not on a tmpfs, or a
// store is there whose files the mount would hide. kUnavailable: this kernel has no huge pages for
// tmpfs.
Result<void> mount_huge_pages(const std::filesystem::path& directory);

struct HugeBytes {
  std::uint64_t huge = 0;
  std::uint64_t all = 0;
};
// How much of the safetensors files below `directory` lies in huge pages. Files that cannot be
// mapped do not count.
HugeBytes count_huge_bytes(const std::filesystem::path& directory);

}  // namespace rekindle::store
