#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "transport/verbs/host/topology.h"

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

// A port of this host, as it may reach GPU memory.
struct GpuRail {
  RailPlace place;
  // takes_dmabuf() of its device.
  bool dmabuf = false;
};
// The rails that may write into this GPU's memory, as indexes into `rails`: those that the topology
// file lists for the GPU, else those that share a PCIe switch with it (PIX, PXB) and have at least
// half of the fastest one's speed. The CPU's root complex forwards writes between two devices
// slowly, or not at all. Every one of them registers dmabufs. kUnavailable: there is none; the
// error says why. Pure.
Result<std::vector<std::size_t>> choose_gpu_rails(const Topology& topology,
                                                  std::span<const GpuRail> rails,
                                                  const GpuPlace& gpu);

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
