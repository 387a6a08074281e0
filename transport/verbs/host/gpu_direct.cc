#include "transport/verbs/host/gpu_direct.h"

namespace rekindle::transport::verbs {

std::string_view to_string(GpuDirect how) {
  switch (how) {
    case GpuDirect::kDmabuf:
      return "dmabuf";
    case GpuDirect::kPeermem:
      return "peermem";
    case GpuDirect::kHostStaging:
      return "host staging";
  }
  return "?";
}

GpuDirectDecision decide_gpu_direct(const GpuDirectFacts& facts) {
  if (!facts.gpu) return {GpuDirect::kHostStaging, "no GPU", ""};
  if (facts.driver_dmabuf && facts.nic_dmabuf) {
    return {GpuDirect::kDmabuf, "the GPU driver exports dmabufs and the NICs register them", ""};
  }
  const std::string lacking = facts.nic_dmabuf      ? "the GPU driver exports no dmabuf"
                              : facts.driver_dmabuf ? "not every NIC registers dmabufs"
                                                    : "neither GPU driver nor NICs have dmabuf";
  if (facts.peermem) return {GpuDirect::kPeermem, lacking + ", nvidia_peermem is loaded", ""};
  return {GpuDirect::kHostStaging, lacking + ", and nvidia_peermem is not loaded",
          facts.nic_dmabuf ? "modprobe nvidia_peermem, or use NVIDIA's open kernel modules (dmabuf)"
                           : "modprobe nvidia_peermem, or use Linux 5.12 or newer with its own NIC "
                             "drivers (dmabuf)"};
}

bool peermem_loaded(const std::filesystem::path& sysfs) {
  std::error_code error;
  return std::filesystem::exists(sysfs / "module/nvidia_peermem", error) ||
         std::filesystem::exists(sysfs / "module/nv_peer_mem", error);
}

}  // namespace rekindle::transport::verbs
