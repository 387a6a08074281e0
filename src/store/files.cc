#include "src/store/files.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace rekindle::store {

namespace {

Failure fail_path(int error_number, std::string_view what, const fs::path& path) {
  return fail_errno(error_number, fmt::format("{} {}", what, path.string()));
}

Result<void> write_all(int fd, std::string_view bytes, const fs::path& path) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return fail_path(errno, "write", path);
    bytes.remove_prefix(static_cast<std::size_t>(put));
  }
  return {};
}

}  // namespace

Result<std::string> read_file(const fs::path& path, std::uint64_t max_bytes) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd) return fail_path(errno, "open", path);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return fail_path(errno, "stat", path);
  if (!S_ISREG(status.st_mode)) {
    return fail(ErrorCode::kInvalid, "{} is not a regular file", path.string());
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > max_bytes) {
    return fail(ErrorCode::kInvalid, "{} has {} bytes, the most allowed is {}", path.string(), size,
                max_bytes);
  }
  std::string bytes(size, '\0');
  TRY_VOID(read_exactly(fd.get(), std::as_writable_bytes(std::span(bytes)), 0, path));
  return bytes;
}

Result<void> write_file_atomically(const fs::path& path, std::string_view bytes,
                                   AfterPowerCut after) {
  const fs::path fresh = path.string() + ".new";
  const UniqueFd fd(
      ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return fail_path(errno, "create", fresh);
  auto written = write_all(fd.get(), bytes, fresh);
  const bool sync = after == AfterPowerCut::kWhole && !is_memory_backed(fd.get());
  if (written && sync && ::fsync(fd.get()) != 0) {
    written = fail_path(errno, "sync", fresh);
  }
  if (written) written = rename_file(fresh, path);
  if (!written) ::unlink(fresh.c_str());
  return written;
}

Result<void> read_exactly(int fd, std::span<std::byte> out, std::uint64_t offset,
                          const fs::path& path) {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_path(errno, "read", path);
    if (got == 0) {
      return fail(ErrorCode::kCorrupt, "{} was truncated to {} bytes while it was read",
                  path.string(), offset);
    }
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return {};
}

Result<void> rename_file(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    return fail_path(errno, fmt::format("rename {} to", from.string()), to);
  }
  return {};
}

Result<void> unlink_if_present(const fs::path& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return fail_path(errno, "unlink", path);
  return {};
}

Result<void> remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) return fail_path(error.value(), "remove", path);
  return {};
}

Result<std::vector<fs::path>> entries_of(const fs::path& directory) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (auto it = fs::directory_iterator(directory, error); !error && it != fs::end(it);
       it.increment(error)) {
    entries.push_back(it->path());
  }
  if (error) return fail_errno(error.value(), directory.string());
  std::sort(entries.begin(), entries.end());
  return entries;
}

Result<void> sync_directory(const fs::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return fail_path(errno, "open", path);
  if (!is_memory_backed(fd.get()) && ::fsync(fd.get()) != 0) return fail_path(errno, "sync", path);
  return {};
}

Result<void> make_directory(const fs::path& path) {
  if (::mkdir(path.c_str(), 0700) == 0) return {};
  struct stat status {};
  if (errno == EEXIST && ::lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return {};
  return fail_path(errno, "create directory", path);
}

std::size_t store_threads() {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 32);
}

bool is_memory_backed(int fd) {
  struct statfs status {};
  if (::fstatfs(fd, &status) != 0) return false;
  const auto type = static_cast<unsigned long>(status.f_type);
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC || type == HUGETLBFS_MAGIC;
}

}  // namespace rekindle::store
