#pragma once

#include <memory>

#include "src/base/result.h"
#include "src/cuda/registrations.h"

// The CUDA driver, found at run time: nothing is linked, so that one build serves hosts with GPUs
// and without. <cuda.h> stays inside src/cuda.
namespace rekindle::cuda {

struct Api;

// Thread-safe. The library is never unloaded.
class Driver {
 public:
  // Starts CUDA in this process (cuInit), and nothing before it does: not to be called by a process
  // that will fork and use CUDA in the child. kNotFound: there is no driver, it is older than 12.0,
  // or it has no device.
  static Result<std::shared_ptr<const Driver>> load(const char* library = "libcuda.so.1");
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  int version() const { return version_; }  // 12080: 12.8
  const Api& api() const { return *api_; }
  // Of host memory, by any device of this driver.
  Registrations& registrations() const { return registrations_; }

 private:
  explicit Driver(std::unique_ptr<Api> api);

  const std::unique_ptr<Api> api_;
  int version_ = 0;
  mutable Registrations registrations_;
};

}  // namespace rekindle::cuda
