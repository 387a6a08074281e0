#include "src/store/store_directory.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/durable_directory.h"
#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/version.h"
#include "src/base/way.h"
#include "src/store/files.h"
#include "src/store/segment_pool.h"
#include "src/tensor/canonical.h"

namespace rekindle::store {

namespace {

constexpr std::string_view kMarkerName = ".rekindle-store";
constexpr std::string_view kMarker = "rekindle-store 2\n";
constexpr std::string_view kLockName = "lock";

std::string first_line(std::string_view text) {
  return canonical::printable(text.substr(0, text.find('\n')));
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (auto it = fs::directory_iterator(directory, error); !error && it != fs::end(it);
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Result<void> check_owner(int fd, const fs::path& directory) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return fail_errno(errno, directory.string());
  if (status.st_uid != ::geteuid()) {
    return fail(ErrorCode::kDenied,
                "store {} belongs to user {}, this process runs as {}: choose another directory "
                "with --store",
                directory.string(), status.st_uid, ::geteuid());
  }
  if ((status.st_mode & 022) != 0) {
    return fail(ErrorCode::kDenied,
                "store {} can be written by others (mode {:o}): run chmod 700 on it",
                directory.string(), status.st_mode & 07777u);
  }
  return {};
}

// The owner of a directory above the store may put another one in its place, whatever its mode.
// Other users may do so if they may write to it. A sticky directory, such as /tmp, keeps them from
// it. Volumes of Kubernetes are open like that, so an open directory only gives a warning.
Result<void> check_above(const fs::path& store, const fs::path& above, const struct stat& status) {
  if (is_foreign(status)) {
    return fail(ErrorCode::kDenied,
                "store {}: {} {} belongs to user {}, who may replace the store: choose a directory "
                "below those of root or of user {} with --store",
                store.string(), above.string(),
                S_ISLNK(status.st_mode) ? "on the way to it" : "above it", status.st_uid,
                ::geteuid());
  }
  return {};
}

void warn_if_open(const fs::path& store, const fs::path& above, const struct stat& status) {
  const bool open = (status.st_mode & S_IWOTH) != 0 && (status.st_mode & S_ISVTX) == 0;
  if (open && S_ISDIR(status.st_mode)) {
    log::warn("store.open_parent", "store", store.string(), "parent", above.string(), "mode",
              fmt::format("{:o}", status.st_mode & 07777u), "hint",
              "every user may replace the store: chmod o-w or +t the parent");
  }
}

Result<void> check_parents(const fs::path& directory) {
  return check_way(directory, [&](const fs::path& above, const struct stat& status) {
    return check_above(directory, above, status);
  });
}

Result<void> check_made_parents(const fs::path& directory) {
  return check_way(directory, [&](const fs::path& above, const struct stat& status) {
    auto checked = check_above(directory, above, status);
    if (checked) warn_if_open(directory, above, status);
    return checked;
  });
}

// A directory without a (whole) marker is taken only when nothing but our own first files is there.
Result<void> check_marker(const fs::path& directory) {
  const fs::path path = directory / kMarkerName;
  std::error_code ignored;
  if (fs::exists(path, ignored)) {
    TRY(const std::string marker, read_file(path, 4096));
    if (marker == kMarker) return {};
    if (!kMarker.starts_with(marker)) {
      return fail(ErrorCode::kDenied,
                  "store {} has the format '{}', this release ({}) reads '{}': start the release "
                  "that wrote it, or give another directory; nothing was changed",
                  directory.string(), first_line(marker), software_version(), first_line(kMarker));
    }
  }
  for (const std::string& name : names_in(directory)) {
    if (name == kMarkerName || name == kLockName || name == std::string(kMarkerName) + ".new") {
      continue;
    }
    return fail(ErrorCode::kDenied,
                "{} is not empty and not a rekindle store (it has '{}'): choose an empty or new "
                "directory with --store",
                directory.string(), name);
  }
  TRY_VOID(write_file_atomically(path, kMarker));
  // Before the directories of a store: they alone would look like somebody else's.
  return sync_directory(directory);
}

Result<UniqueFd> lock(const fs::path& directory) {
  const fs::path path = directory / kLockName;
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return fail_errno(errno, fmt::format("open {}", path.string()));
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return fail_errno(errno, fmt::format("lock {}", path.string()));
    char pid[32] = {};
    const ssize_t size = ::pread(fd.get(), pid, sizeof pid - 1, 0);
    return fail(ErrorCode::kUnavailable,
                "store {} is in use by process {}: stop it, or choose another directory with "
                "--store",
                directory.string(), size > 0 ? pid : "(unknown)");
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return fail_errno(errno, fmt::format("write {}", path.string()));
  }
  return fd;
}

}  // namespace

Result<UniqueFd> open_store_directory(const fs::path& directory) {
  // Before anything is made where another user leads us.
  TRY_VOID(check_parents(directory));
  TRY_VOID(make_directory_durably(directory));
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return fail_errno(errno, fmt::format("open store {}", directory.string()));
  TRY_VOID(check_owner(fd.get(), directory));
  TRY_VOID(check_made_parents(directory));
  TRY_VOID(check_marker(directory));
  TRY(UniqueFd locked, lock(directory));
  TRY_VOID(make_directory(directory / kModelsName));
  TRY_VOID(make_directory(directory / kStagingName));
  TRY_VOID(make_directory(directory / kPoolName));
  TRY_VOID(sync_directory(directory));
  return locked;
}

std::string encode_version(const ModelVersion& id) {
  std::string name;
  for (const char c : id.to_string()) {
    if (c == '/') {
      name += "%2F";
    } else {
      name += c;
    }
  }
  return name;
}

Result<ModelVersion> decode_version(std::string_view name) {
  std::string text;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name.substr(i).starts_with("%2F")) {
      text += '/';
      i += 2;
    } else {
      text += name[i];
    }
  }
  TRY(ModelRef ref, ModelRef::parse(text));
  ModelVersion id{std::move(ref.model), ref.version.value_or(0)};
  if (!ref.version || encode_version(id) != name) {
    return fail(ErrorCode::kInvalid, "'{}' is not MODEL@VERSION", name);
  }
  return id;
}

fs::path version_directory(const fs::path& store, const ModelVersion& id) {
  return store / kModelsName / encode_version(id);
}

fs::path copy_directory(const fs::path& store, const ModelVersion& id, const Digest& layout) {
  return version_directory(store, id) / layout.hex().substr(0, 16);
}

bool is_layout_name(std::string_view name) {
  return name.size() == 16 && name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool is_segment_name(std::string_view name) {
  if (name.ends_with(kPartialSuffix)) name.remove_suffix(kPartialSuffix.size());
  return name.ends_with(".safetensors");
}

bool is_store_file(std::string_view name) {
  if (name.ends_with(".new")) name.remove_suffix(4);
  if (name == kManifestName || name == kPartialManifestName || name == kResumeName ||
      name == kRetiredName) {
    return true;
  }
  return is_segment_name(name);
}

Result<void> remove_copy(const fs::path& directory, SegmentPool& pool, Deletion when) {
  const fs::path marker = directory / kRetiredName;
  std::error_code ignored;
  if (fs::exists(directory / kPartialManifestName, ignored)) {
    TRY_VOID(rename_file(directory / kPartialManifestName, marker));
  }
  if (fs::exists(directory / kManifestName, ignored)) {
    TRY_VOID(rename_file(directory / kManifestName, marker));
    // Before anything of a committed copy goes or changes.
    TRY_VOID(sync_directory(directory));
  }
  TRY_VOID(failpoint("store.remove.after_marker"));
  bool strays = false;
  for (const std::string& name : names_in(directory)) {
    if (name == kRetiredName) continue;
    if (!is_store_file(name)) {
      log::warn("store.stray_file", "file", (directory / name).string(), "action", "kept");
      strays = true;
      continue;
    }
    if (is_segment_name(name)) {
      TRY_VOID(pool.put(directory / name, when));
    } else {
      TRY_VOID(unlink_if_present(directory / name));
    }
    TRY_VOID(failpoint("store.remove.between_files"));
  }
  TRY_VOID(unlink_if_present(marker));
  TRY_VOID(failpoint("store.remove.before_rmdir"));
  if (!strays && ::rmdir(directory.c_str()) != 0 && errno != ENOENT) {
    return fail_errno(errno, fmt::format("remove {}", directory.string()));
  }
  ::rmdir(directory.parent_path().c_str());  // the version's, when this was its last copy
  return {};
}

std::uint64_t disk_bytes(const fs::path& directory) {
  std::uint64_t total = 0;
  for (const std::string& name : names_in(directory)) {
    struct stat status {};
    if (::lstat((directory / name).c_str(), &status) == 0 && S_ISREG(status.st_mode)) {
      // Pages that are not allocated yet are promised.
      total += static_cast<std::uint64_t>(std::max(status.st_blocks * 512, status.st_size));
    }
  }
  return total;
}

}  // namespace rekindle::store
