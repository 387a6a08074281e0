#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "src/base/result.h"

namespace rekindle::coordinator {

struct CoordinatorOptions {
  std::string listen = "0.0.0.0:7300";    // port 0 = any
  std::filesystem::path state_directory;  // epoch and version table; locked
  std::filesystem::path secret_file;
  std::chrono::milliseconds heartbeat_interval{250};
  std::chrono::milliseconds suspect_after{750};
  std::chrono::milliseconds dead_after{2000};
  std::size_t max_pullers_per_source = 8;
  std::function<void(const std::string& address)> on_ready;
};

// The `rekindle coordinator` daemon: runs until SIGTERM or SIGINT, or a fatal error.
Result<void> run_coordinator(const CoordinatorOptions& options);

}  // namespace rekindle::coordinator
