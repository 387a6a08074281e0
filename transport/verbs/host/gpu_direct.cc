#include "transport/verbs/host/gpu_direct.h"

#include <dlfcn.h>

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

Result<std::vector<std::size_t>> choose_gpu_rails(const Topology& topology,
                                                  std::span<const GpuRail> rails,
                                                  const GpuPlace& gpu) {
  std::vector<RailPlace> places;
  for (const GpuRail& rail : rails) places.push_back(rail.place);
  const Place target{.gpu = gpu.bus_id, .numa_node = gpu.numa_node};
  const bool listed = topology.listed_rails(target) != nullptr;
  std::vector<std::size_t> near;
  for (const std::size_t rail : order_rails(topology, places, target).preferred) {
    const NicPlace* const nic = topology.nic(places[rail].device);
    if (listed || (nic != nullptr && topology.distance(*nic, gpu) <= Distance::kPxb)) {
      near.push_back(rail);
    }
  }
  if (near.empty()) {
    return fail(ErrorCode::kUnavailable,
                "no rail shares a PCIe switch with GPU {}; a topology file can name one",
                gpu.bus_id);
  }
  const std::string nearest = places[near.front()].device;
  std::erase_if(near, [&](std::size_t rail) { return !rails[rail].dmabuf; });
  if (near.empty()) {
    return fail(ErrorCode::kUnavailable, "{}, the nearest NIC of GPU {}, registers no dmabufs",
                nearest, gpu.bus_id);
  }
  return near;
}

bool peermem_loaded(const std::filesystem::path& sysfs) {
  std::error_code error;
  return std::filesystem::exists(sysfs / "module/nvidia_peermem", error) ||
         std::filesystem::exists(sysfs / "module/nv_peer_mem", error);
}

namespace {

// From cuda.h. These values are part of the driver's ABI.
constexpr int kSuccess = 0;
constexpr int kAttributeDmabufSupported = 124;
constexpr int kHandleDmabufFd = 1;

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

struct CudaExport::Library {
  ~Library() {
    if (handle != nullptr) ::dlclose(handle);
  }
  void* handle = nullptr;
  int (*init)(unsigned flags) = nullptr;
  int (*device_count)(int* count) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*attribute)(int* value, int attribute, int device) = nullptr;
  int (*export_range)(void* handle, unsigned long long address, std::size_t bytes, int type,
                      unsigned long long flags) = nullptr;
};

CudaExport::CudaExport(std::unique_ptr<Library> library) : library_(std::move(library)) {}
CudaExport::~CudaExport() = default;

Result<std::unique_ptr<CudaExport>> CudaExport::load() {
  auto library = std::make_unique<Library>();
  library->handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library->handle == nullptr) return fail(ErrorCode::kNotFound, "no CUDA driver");
  const bool complete =
      find(library->handle, "cuInit", library->init) &&
      find(library->handle, "cuDeviceGetCount", library->device_count) &&
      find(library->handle, "cuDeviceGet", library->device_get) &&
      find(library->handle, "cuDeviceGetAttribute", library->attribute) &&
      find(library->handle, "cuMemGetHandleForAddressRange", library->export_range);
  if (!complete) {
    return fail(ErrorCode::kNotFound, "the CUDA driver has no dmabuf: it is older than 11.7");
  }
  std::unique_ptr<CudaExport> cuda(new CudaExport(std::move(library)));
  const Library& calls = *cuda->library_;
  if (const int error = calls.init(0); error != kSuccess) {
    return fail(ErrorCode::kNotFound, "the CUDA driver does not start: error {}", error);
  }
  if (calls.device_count(&cuda->gpus_) != kSuccess) cuda->gpus_ = 0;
  cuda->all_support_ = cuda->gpus_ > 0;
  for (int ordinal = 0; ordinal < cuda->gpus_; ++ordinal) {
    int device = 0;
    int value = 0;
    cuda->all_support_ &= calls.device_get(&device, ordinal) == kSuccess &&
                          calls.attribute(&value, kAttributeDmabufSupported, device) == kSuccess &&
                          value != 0;
  }
  return cuda;
}

Result<UniqueFd> CudaExport::export_range(std::uint64_t address, std::uint64_t bytes) const {
  int fd = -1;
  const int error = library_->export_range(&fd, address, bytes, kHandleDmabufFd, 0);
  if (error != kSuccess || fd < 0) {
    return fail(
        ErrorCode::kUnavailable,
        "export {} bytes of GPU memory as dmabuf: CUDA error {}; is the range whole pages of "
        "one allocation?",
        bytes, error);
  }
  return UniqueFd(fd);
}

}  // namespace rekindle::transport::verbs
