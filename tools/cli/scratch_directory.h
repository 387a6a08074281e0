#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "src/base/result.h"

namespace rekindle::cli {

// A directory of this user alone. Removed with everything in it.
class ScratchDirectory {
 public:
  // In `base`: PREFIX.XXXXXX.
  static Result<std::unique_ptr<ScratchDirectory>> create(const std::filesystem::path& base,
                                                          std::string_view prefix) {
    std::string path = (base / (std::string(prefix) + ".XXXXXX")).string();
    if (::mkdtemp(path.data()) == nullptr) return fail_errno(errno, path);
    return std::unique_ptr<ScratchDirectory>(new ScratchDirectory(path));
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  explicit ScratchDirectory(std::filesystem::path path) : path_(std::move(path)) {}
  const std::filesystem::path path_;
};

}  // namespace rekindle::cli
