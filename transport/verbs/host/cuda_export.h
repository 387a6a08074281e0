#pragma once

#include <cstdint>
#include <memory>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::transport::verbs {

// The part of the CUDA driver that hands out GPU memory as dmabuf. libcuda.so.1 is loaded at run
// time, so that this binary starts without a driver. Thread-safe.
class CudaExport {
 public:
  // kNotFound: there is no driver, or it has no dmabuf (older than 11.7). This initialises CUDA in
  // the process: do not call it where a process must survive GPU failures.
  static Result<std::unique_ptr<CudaExport>> load();
  ~CudaExport();
  CudaExport(const CudaExport&) = delete;
  CudaExport& operator=(const CudaExport&) = delete;

  int gpus() const { return gpus_; }
  bool all_support_dmabuf() const { return all_support_; }
  // `address` and `bytes` are multiples of the host's page size. The memory belongs to the calling
  // thread's current context. The descriptor keeps it alive.
  Result<UniqueFd> export_range(std::uint64_t address, std::uint64_t bytes) const;

 private:
  struct Library;
  explicit CudaExport(std::unique_ptr<Library> library);

  std::unique_ptr<Library> library_;
  int gpus_ = 0;
  bool all_support_ = false;
};

}  // namespace rekindle::transport::verbs
