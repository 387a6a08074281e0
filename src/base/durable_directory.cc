#include "src/base/durable_directory.h"

#include <cerrno>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/unique_fd.h"

namespace rekindle {

namespace {

namespace fs = std::filesystem;

fs::path above(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

Failure fail_path(int error_number, std::string_view what, const fs::path& path) {
  return fail_errno(error_number, fmt::format("{} {}", what, path.string()));
}

// A directory of another user that this one may pass but not read cannot be synced here.
Result<void> sync_entries(const fs::path& directory, bool must) {
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) {
    if (!must && errno == EACCES) return {};
    return fail_path(errno, "open", directory);
  }
  // EINVAL: a file system that keeps nothing, such as one of the kernel's own.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) return fail_path(errno, "sync", directory);
  return {};
}

// Returns 0, or why there is no new directory.
int make(const fs::path& path, mode_t mode) { return ::mkdir(path.c_str(), mode) == 0 ? 0 : errno; }

Result<void> make_missing(const fs::path& path) {
  int error = make(path, 0777);
  if (error == ENOENT) {
    TRY_VOID(make_missing(above(path)));
    error = make(path, 0777);
  }
  if (error == EEXIST) return {};
  if (error != 0) return fail_path(error, "create directory", path);
  return sync_entries(above(path), true);
}

}  // namespace

Result<void> make_directory_durably(const fs::path& path) {
  const fs::path plain = path.has_filename() ? path : path.parent_path();  // without a last slash
  int error = make(plain, 0700);
  if (error == ENOENT) {
    TRY_VOID(make_missing(above(plain)));
    error = make(plain, 0700);
  }
  if (error != 0 && error != EEXIST) return fail_path(error, "create directory", plain);
  std::error_code ignored;
  if (!fs::is_directory(plain, ignored)) {
    return fail(ErrorCode::kInvalid, "{} is not a directory", plain.string());
  }
  return sync_entries(above(plain), error == 0);
}

}  // namespace rekindle
