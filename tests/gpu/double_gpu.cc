#include <filesystem>

#include <sys/stat.h>

#include "tests/gpu/gpu.h"

namespace rekindle::testing {

namespace fs = std::filesystem;

std::string gpu_missing() { return {}; }
std::string agent_gpu() { return "double:1"; }
std::string worker_device() { return "double:0"; }
std::string gpus_missing(int /*count*/) { return {}; }
std::string agent_gpus(int count) { return "double:" + std::to_string(count); }
std::string worker_device(int index) { return "double:" + std::to_string(index); }

std::uint64_t device_bytes_used(pid_t device_process) {
  std::uint64_t bytes = 0;
  std::error_code gone;
  fs::directory_iterator item("/proc/" + std::to_string(device_process) + "/fd", gone);
  for (; !gone && item != fs::directory_iterator(); item.increment(gone)) {
    std::error_code closed;
    if (!fs::read_symlink(item->path(), closed).string().starts_with("/memfd:rekindle-device")) {
      continue;
    }
    struct stat info {};
    if (::stat(item->path().c_str(), &info) == 0) bytes += static_cast<std::uint64_t>(info.st_size);
  }
  return bytes;
}

}  // namespace rekindle::testing
