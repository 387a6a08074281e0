#include "src/base/settings_file.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/way.h"

namespace rekindle {

namespace {

// Its owner can change a file.
Result<void> check_owner(const struct stat& info, const std::string& what) {
  if (!is_foreign(info)) return {};
  return fail(ErrorCode::kDenied,
              "the {} belongs to another user (uid {}); run: chown {} on it, as root", what,
              info.st_uid, ::geteuid());
}

Result<std::string> read_all(const UniqueFd& fd, const std::filesystem::path& path,
                             std::size_t most) {
  std::string text(most + 1, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(fd.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(errno, "read " + path.string());
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  if (size > most) {
    return fail(ErrorCode::kInvalid, "{}: it has more than {} bytes", path.string(), most);
  }
  text.resize(size);
  return text;
}

Result<UniqueFd> open_trusted_file(const std::filesystem::path& path) {
  TRY(UniqueFd fd, open_settings_file(path));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return fail_errno(errno, "stat " + path.string());
  const std::string what = "file " + path.string();
  TRY_VOID(check_owner(info, what));
  if ((info.st_mode & S_IWOTH) == 0) return fd;
  return fail(ErrorCode::kDenied, "every user can change the {} (mode {:o}); run: chmod o-w on it",
              what, info.st_mode & 07777);
}

}  // namespace

Result<UniqueFd> open_settings_file(const std::filesystem::path& path) {
  TRY_VOID(check_way(path, [&](const std::filesystem::path& on_way, const struct stat& status) {
    if (!is_foreign(status)) return Result<void>();
    return Result<void>(fail(ErrorCode::kDenied,
                             "{}: {} on the way to it belongs to user {}, who may replace it",
                             path.string(), on_way.string(), status.st_uid));
  }));
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd) return fail_errno(errno, "open " + path.string());
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return fail_errno(errno, "stat " + path.string());
  if (!S_ISREG(info.st_mode)) {
    return fail(ErrorCode::kInvalid, "{} is not a regular file", path.string());
  }
  return fd;
}

Result<void> check_private_file(int fd, const std::string& what) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail_errno(errno, "stat " + what);
  TRY_VOID(check_owner(info, what));
  // Only root can give a file of root to a group. systemd and Kubernetes hand secrets over like
  // that.
  const mode_t forbidden = info.st_uid == 0 ? 037 : 077;
  if ((info.st_mode & forbidden) == 0) return {};
  return fail(ErrorCode::kDenied, "the {} is open to other users (mode {:o}); run: chmod 600 on it",
              what, info.st_mode & 07777);
}

Result<std::string> read_settings_file(const std::filesystem::path& path, std::size_t most) {
  TRY(const UniqueFd fd, open_settings_file(path));
  return read_all(fd, path, most);
}

Result<std::string> read_trusted_file(const std::filesystem::path& path, std::size_t most) {
  TRY(const UniqueFd fd, open_trusted_file(path));
  return read_all(fd, path, most);
}

Result<void> check_trusted_file(const std::filesystem::path& path) {
  TRY_VOID(open_trusted_file(path));
  return {};
}

}  // namespace rekindle
