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
std::string gpus_missing(int count) {
  if (!first()) return first().error().message();
  const auto driver = cuda::Driver::load();
  if (driver && cuda::open_device(*driver, count - 1)) return {};
  return "there are fewer than " + std::to_string(count) + " GPUs";
}
std::string agent_gpus(int /*count*/) { return "auto"; }
std::string worker_device(int index) { return "cuda:" + std::to_string(index); }

std::uint64_t device_bytes_used(pid_t /*device_process*/) {
  const auto memory = (*first())->memory();
  if (!memory) throw std::runtime_error(memory.error().message());
  return memory->total_bytes - memory->free_bytes;
}

}  // namespace rekindle::testing
