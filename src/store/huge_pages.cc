#include "src/store/huge_pages.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "src/store/files.h"

namespace rekindle::store {

namespace {

constexpr std::uint64_t kHugePageBytes = 2 * kMiB;

// The kernel writes a space in a path as \040.
std::string unescaped(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      plain +=
          static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + text[i + 3] - '0');
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

bool lies_in(const fs::path& path, const fs::path& directory) {
  const auto [end, ignored] =
      std::mismatch(directory.begin(), directory.end(), path.begin(), path.end());
  return end == directory.end();
}

// ID PARENT DEVICE ROOT MOUNT-POINT OPTIONS [TAG…] - TYPE SOURCE OPTIONS
struct MountLine {
  fs::path at;
  std::string type;
  std::string options;
};

std::optional<MountLine> parse_mount(const std::string& line) {
  std::istringstream words(line);
  const std::vector<std::string> all{std::istream_iterator<std::string>(words), {}};
  const auto dash = std::ranges::find(all, "-");
  if (all.size() < 7 || std::distance(dash, all.end()) < 4) return std::nullopt;
  return MountLine{unescaped(all[4]), dash[1], dash[3]};
}

std::string huge_option(const std::string& options) {
  constexpr std::string_view kName = "huge=";
  std::istringstream parts(options);
  for (std::string part; std::getline(parts, part, ',');) {
    if (part.starts_with(kName)) return part.substr(kName.size());
  }
  return "never";
}

std::string read_mounts() {
  std::ifstream file("/proc/self/mountinfo");
  return {std::istreambuf_iterator<char>(file), {}};
}

bool has_entries(const fs::path& directory) {
  std::error_code error;
  return fs::directory_iterator(directory, error) != fs::directory_iterator();
}

// The value in KiB of a line of /proc/self/smaps, as bytes.
std::uint64_t kib_of(const std::string& line) {
  return std::strtoull(line.c_str() + line.find(':') + 1, nullptr, 10) * kKiB;
}

// Bytes of the mapping at `data` that huge page table entries map.
std::uint64_t huge_mapped(const void* data) {
  std::ifstream smaps("/proc/self/smaps");
  const std::string begin = fmt::format("{:x}-", reinterpret_cast<std::uintptr_t>(data));
  std::string line;
  while (std::getline(smaps, line) && !line.starts_with(begin)) {
  }
  std::uint64_t bytes = 0;
  while (std::getline(smaps, line) && !line.starts_with("VmFlags:")) {
    if (line.starts_with("ShmemPmdMapped:") || line.starts_with("FilePmdMapped:")) {
      bytes += kib_of(line);
    }
  }
  return bytes;
}

HugeBytes count_file(const fs::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) {
    return {};
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  void* const data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return {};
  // A read maps the page where it lies, as a huge one if it is one. It goes through the kernel,
  // which answers for a truncated file with an error instead of a signal.
  for (std::uint64_t at = 0; at < size; at += kHugePageBytes) {
    (void)::madvise(static_cast<char*>(data) + at, std::min(kPageBytes, size - at),
                    MADV_POPULATE_READ);
  }
  const HugeBytes counted{huge_mapped(data), size};
  ::munmap(data, size);
  return counted;
}

}  // namespace

std::optional<TmpfsMount> find_tmpfs(std::string_view mountinfo, const fs::path& path) {
  std::optional<MountLine> found;
  std::istringstream lines{std::string(mountinfo)};
  for (std::string line; std::getline(lines, line);) {
    auto mount = parse_mount(line);
    if (!mount || !lies_in(path, mount->at)) continue;
    // Of mounts at one place the last one covers the others.
    if (!found || lies_in(mount->at, found->at)) found = std::move(mount);
  }
  if (!found || found->type != "tmpfs") return std::nullopt;
  return TmpfsMount{found->at, huge_option(found->options)};
}

Result<void> mount_huge_pages(const fs::path& directory) {
  const auto below = find_tmpfs(read_mounts(), directory);
  if (!below) {
    return fail(ErrorCode::kInvalid, "{} is not on a tmpfs, so there are no huge pages for it",
                directory.string());
  }
  if (below->gives_huge_pages()) return {};
  const std::string remount = fmt::format(
      "`mount -o remount,huge=within_size {}` gives them to new files", below->at.string());
  if (below->at == directory) {
    return fail(ErrorCode::kInvalid,
                "{} is mounted without huge pages, perhaps from outside of a container; {} there",
                directory.string(), remount);
  }
  if (has_entries(directory)) {
    return fail(ErrorCode::kInvalid,
                "{} has files without huge pages, which a mount would hide; {}", directory.string(),
                remount);
  }
  struct statvfs status {};
  if (::statvfs(below->at.c_str(), &status) != 0) return fail_errno(errno, below->at.string());
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return fail_errno(errno, fmt::format("create {}", directory.string()));
  }
  const std::string options =
      fmt::format("huge=within_size,mode=0700,uid={},gid={},size={}", ::geteuid(), ::getegid(),
                  std::uint64_t{status.f_blocks} * status.f_frsize);
  if (::mount("rekindle", directory.c_str(), "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC,
              options.c_str()) == 0) {
    return {};
  }
  if (errno == EPERM || errno == EACCES) {
    return fail(ErrorCode::kDenied, "this process may not mount a tmpfs with huge pages at {}; {}",
                directory.string(), remount);
  }
  if (errno == EINVAL) {
    return fail(ErrorCode::kUnavailable, "this kernel has no huge pages for tmpfs");
  }
  return fail_errno(errno, fmt::format("mount a tmpfs at {}", directory.string()));
}

HugeBytes count_huge_bytes(const fs::path& directory) {
  HugeBytes sum;
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().extension() != ".safetensors") continue;
    const HugeBytes one = count_file(it->path());
    sum.huge += one.huge;
    sum.all += one.all;
  }
  return sum;
}

}  // namespace rekindle::store
