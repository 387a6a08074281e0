#include "src/base/beneath.h"

#include <cerrno>
#include <cstdio>

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace rekindle {

namespace {

Failure open_failure(int error, const std::string& name) {
  if (error != ELOOP && error != EXDEV) return fail_errno(error, "open " + name);
  return fail(ErrorCode::kDenied,
              "{} is a symbolic link, which is not written through: remove it, or choose another "
              "directory",
              name);
}

// Where the kernel has no openat2 (before Linux 5.6, and in some sandboxes), part by part.
Result<UniqueFd> open_by_parts(int directory, const std::string& name, int flags, mode_t mode) {
  UniqueFd at;
  std::string_view rest = name;
  for (auto slash = rest.find('/'); slash != std::string_view::npos; slash = rest.find('/')) {
    const std::string part(rest.substr(0, slash));
    if (part.empty() || part == "..") return open_failure(EXDEV, name);
    UniqueFd next(::openat(at ? at.get() : directory, part.c_str(),
                           O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!next) return open_failure(errno == ENOTDIR ? ELOOP : errno, name);
    at = std::move(next);
    rest.remove_prefix(slash + 1);
  }
  const std::string last(rest);
  if (last.empty() || last == "..") return open_failure(EXDEV, name);
  UniqueFd fd(
      ::openat(at ? at.get() : directory, last.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, mode));
  if (fd) return fd;
  const bool is_directory_wanted = (flags & O_DIRECTORY) != 0;
  return open_failure(errno == ENOTDIR && is_directory_wanted ? ELOOP : errno, name);
}

}  // namespace

Result<UniqueFd> open_directory(const std::filesystem::path& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return fail_errno(errno, "open " + path.string());
  return fd;
}

Result<UniqueFd> open_beneath(int directory, const std::string& name, int flags, mode_t mode) {
  open_how how{};
  // With O_NOFOLLOW, a link at the end would be "not a directory" instead of a link.
  how.flags = static_cast<std::uint64_t>((flags & ~O_NOFOLLOW) | O_CLOEXEC);
  how.mode = (flags & O_CREAT) != 0 ? mode : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS;
  for (int attempt = 0; attempt < 16; ++attempt) {
    const auto number = ::syscall(SYS_openat2, directory, name.c_str(), &how, sizeof how);
    if (number >= 0) return UniqueFd(static_cast<int>(number));
    if (errno == ENOSYS || errno == EPERM) return open_by_parts(directory, name, flags, mode);
    // EAGAIN: a directory was renamed meanwhile, so the kernel cannot tell.
    if (errno != EAGAIN && errno != EINTR) return open_failure(errno, name);
  }
  return fail(ErrorCode::kUnavailable, "open {}: its directories are renamed all the time", name);
}

Result<UniqueFd> make_beneath(int directory, const std::string& name) {
  if (::mkdirat(directory, name.c_str(), 0777) != 0 && errno != EEXIST) {
    return fail_errno(errno, "create " + name);
  }
  return open_beneath(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
}

Result<void> replace_beneath(int directory, const std::string& name, std::string_view content) {
  const std::string temporary = name + ".partial";
  ::unlinkat(directory, temporary.c_str(), 0);
  TRY(const UniqueFd file,
      open_beneath(directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0644));
  while (!content.empty()) {
    const ssize_t put = ::write(file.get(), content.data(), content.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return fail_errno(errno, "write " + temporary);
    content.remove_prefix(static_cast<std::size_t>(put));
  }
  if (::renameat(directory, temporary.c_str(), directory, name.c_str()) != 0) {
    return fail_errno(errno, "rename " + name);
  }
  return {};
}

std::filesystem::path path_of(int directory) {
  return "/proc/self/fd/" + std::to_string(directory);
}

}  // namespace rekindle
