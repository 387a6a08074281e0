#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

// How a NIC reaches GPU memory. This has not run on hardware, as no machine with both was at hand.
// Only the export has run, on an H200.
namespace rekindle::transport::verbs {

struct GpuDirectFacts {
  // The host has a GPU.
  bool gpu = false;
  // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED of all GPUs.
  bool driver_dmabuf = false;
  // takes_dmabuf() of all devices in use.
  bool nic_dmabuf = false;
  // peermem_loaded().
  bool peermem = false;
};

enum class GpuDirect : std::uint8_t {
  kDmabuf,       // the kernel's own way
  kPeermem,      // nvidia_peermem: ibv_reg_mr takes GPU addresses
  kHostStaging,  // through host memory
};
std::string_view to_string(GpuDirect how);

struct GpuDirectDecision {
  GpuDirect how = GpuDirect::kHostStaging;
  std::string why;
  // Advice for a better way; "": none.
  std::string advice;
};
GpuDirectDecision decide_gpu_direct(const GpuDirectFacts& facts);

bool peermem_loaded(const std::filesystem::path& sysfs);

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
