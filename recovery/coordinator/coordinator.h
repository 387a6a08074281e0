#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "recovery/coordinator/etcd/options.h"
#include "src/base/result.h"

namespace rekindle::coordinator {

struct CoordinatorOptions {
  std::string listen = "0.0.0.0:7300";    // port 0 = any
  std::filesystem::path state_directory;  // epoch and version table; locked. Or:
  etcd::EtcdOptions etcd;                 // the state lies there, several may stand by
  std::filesystem::path secret_file;
  std::chrono::milliseconds heartbeat_interval{250};
  std::chrono::milliseconds suspect_after{750};
  std::chrono::milliseconds dead_after{2000};
  std::size_t max_pullers_per_source = 8;
  std::uint32_t replicas = 0;  // whole copies to keep of a version that does not say
  std::uint64_t recopy_bytes_per_second = std::uint64_t{256}
                                          << 20;  // of each copy made; 0 = no cap
  std::function<void(const std::string& address)> on_ready;
};

// The `rekindle coordinator` daemon: runs until SIGTERM or SIGINT, or a fatal error.
Result<void> run_coordinator(const CoordinatorOptions& options);

}  // namespace rekindle::coordinator
