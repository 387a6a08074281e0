#include <stdexcept>

#include "src/cuda/device.h"
#include "tests/gpu/gpu.h"

namespace rekindle::testing {

namespace {

Result<std::unique_ptr<bucket::Device>> open_first() {
  TRY(auto driver, cuda::Driver::load());
  return cuda::open_device(std::move(driver), 0);
}
const Result<std::unique_ptr<bucket::Device>>& first() {
  static const auto device = open_first();
  return device;
}

}  // namespace

std::string gpu_missing() { return first() ? "" : first().error().message(); }
std::string agent_gpu() { return "auto"; }
std::string worker_device() { return "cuda:0"; }

std::uint64_t device_bytes_used(pid_t /*device_process*/) {
  const auto memory = (*first())->memory();
  if (!memory) throw std::runtime_error(memory.error().message());
  return memory->total_bytes - memory->free_bytes;
}

}  // namespace rekindle::testing
