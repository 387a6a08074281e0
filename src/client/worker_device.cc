#include "src/client/worker_device.h"

#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include "src/base/worker_pool.h"
#include "src/bucket/double_device.h"

#if REKINDLE_WITH_CUDA
#include "src/cuda/device.h"
#include "src/cuda/driver.h"
#endif

namespace rekindle::client {

namespace {

// Memory is taken only when it is used.
constexpr std::uint64_t kDoubleBytes = 8ull << 30;
constexpr std::string_view kCuda = "cuda";

// The number in "cuda:N".
std::optional<int> ordinal_of(std::string_view name) {
  if (!name.starts_with(kCuda) || name.substr(kCuda.size(), 1) != ":") return std::nullopt;
  const std::string_view digits = name.substr(kCuda.size() + 1);
  int ordinal = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
  if (error != std::errc() || end != digits.data() + digits.size() || ordinal < 0) {
    return std::nullopt;
  }
  return ordinal;
}

bool is_gpu(std::string_view name) {
  return name == kCuda || name.starts_with("GPU-") || name.starts_with("MIG-") || ordinal_of(name);
}

Result<std::unique_ptr<bucket::Device>> open_gpu([[maybe_unused]] std::string_view name) {
#if REKINDLE_WITH_CUDA
  TRY(const auto driver, cuda::Driver::load());
  if (const auto ordinal = ordinal_of(name)) return cuda::open_device(driver, *ordinal);
  if (name != kCuda) return cuda::open_device_by_id(driver, name);
  TRY(const int current, cuda::current_device_ordinal(*driver));
  return cuda::open_device(driver, current);
#else
  return fail(ErrorCode::kUnavailable, "this librekindle was built without CUDA");
#endif
}

Result<std::unique_ptr<bucket::Device>> open_device(const std::string& name) {
  if (bucket::is_double(name)) return bucket::make_double_device(name, kDoubleBytes);
  if (is_gpu(name)) return open_gpu(name);
  return fail(ErrorCode::kInvalid,
              "'{}' is no device: say \"cuda\", \"cuda:1\", a GPU's UUID or \"double:0\"", name);
}

}  // namespace

Result<WorkerDevice> open_worker_device(const std::string& name, void* stream) {
  const SignalsBlocked blocked;
  WorkerDevice worker;
  TRY(worker.device, open_device(name));
  TRY(worker.stream, worker.device->borrow_stream(stream));
  return worker;
}

}  // namespace rekindle::client
