#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "src/base/result.h"

namespace rekindle::worker {

// DIR/agent/ready/INSTANCE: there while the instance is ready, one line of JSON in it. Written
// aside and renamed, so that who sees it sees all of it. Small files on tmpfs: blocking, on any
// thread.
class ReadyFiles {
 public:
  // Makes the directory; what a last life has left goes.
  static Result<ReadyFiles> open(const std::filesystem::path& directory);

  Result<void> write(const std::string& instance, std::string_view line) const;
  Result<void> remove(const std::string& instance) const;  // not there: fine

 private:
  explicit ReadyFiles(std::filesystem::path directory) : directory_(std::move(directory)) {}
  std::filesystem::path directory_;
};

}  // namespace rekindle::worker
