#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

// How a NIC reaches GPU memory. This has not run on hardware, as no machine with both was at hand.
// Only the export has run, on an H200.
namespace rekindle::transport::verbs {

struct GpuDirectFacts {
  bool gpu = false;            // there is one
  bool driver_dmabuf = false;  // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, of all of them
  bool nic_dmabuf = false;     // takes_dmabuf(), of all devices in use
  bool peermem = false;        // peermem_loaded()
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
  std::string advice;  // what would make it better; "" = nothing
};
GpuDirectDecision decide_gpu_direct(const GpuDirectFacts& facts);

bool peermem_loaded(const std::filesystem::path& sysfs);

}  // namespace rekindle::transport::verbs
