#pragma once

#include <memory>

#include "src/base/result.h"
#include "src/cuda/registrations.h"

// The CUDA driver, found at run time: nothing is linked, so one build serves hosts with and without
// GPUs. <cuda.h> stays inside src/cuda.
namespace rekindle::cuda {

struct Api;

// Thread-safe. The library is never unloaded.
class Driver {
 public:
  // Starts CUDA in this process (cuInit); nothing before this call does. A process that forks and
  // uses CUDA in the child must not call it. kNotFound: there is no driver, it is older than 12.0,
  // or it has no device.
  static Result<std::shared_ptr<const Driver>> load(const char* library = "libcuda.so.1");
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // 12080 is 12.8.
  int version() const { return version_; }
  const Api& api() const { return *api_; }
  // Host memory that any device of this driver has registered.
  Registrations& registrations() const { return registrations_; }

 private:
  explicit Driver(std::unique_ptr<Api> api);

  const std::unique_ptr<Api> api_;
  int version_ = 0;
  mutable Registrations registrations_;
};

}  // namespace rekindle::cuda
