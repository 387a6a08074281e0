#include "recovery/worker/ready_files.h"

#include <cerrno>
#include <cstdio>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/unique_fd.h"

namespace rekindle::worker {

namespace fs = std::filesystem;

Result<ReadyFiles> ReadyFiles::open(const fs::path& directory) {
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return fail_errno(errno, fmt::format("create {}", directory.string()));
  }
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    std::error_code ignored;
    fs::remove(entry.path(), ignored);
    if (ignored) {
      return fail_errno(ignored.value(), fmt::format("remove {}", entry.path().string()));
    }
  }
  if (error) return fail_errno(error.value(), fmt::format("list {}", directory.string()));
  return ReadyFiles(directory);
}

Result<void> ReadyFiles::write(const std::string& instance, std::string_view line) const {
  const fs::path path = directory_ / instance;
  const fs::path aside = directory_ / ("." + instance + ".new");
  const UniqueFd fd(::open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) return fail_errno(errno, fmt::format("create {}", aside.string()));
  const std::string text = std::string(line) + "\n";
  const auto written = ::write(fd.get(), text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size())) {
    const int why = written < 0 ? errno : ENOSPC;
    ::unlink(aside.c_str());
    return fail_errno(why, fmt::format("write {}", aside.string()));
  }
  if (::rename(aside.c_str(), path.c_str()) != 0) {
    return fail_errno(errno, fmt::format("rename {}", aside.string()));
  }
  return {};
}

Result<void> ReadyFiles::remove(const std::string& instance) const {
  const fs::path path = directory_ / instance;
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return fail_errno(errno, fmt::format("remove {}", path.string()));
  }
  return {};
}

}  // namespace rekindle::worker
