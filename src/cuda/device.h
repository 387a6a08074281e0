#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/bucket/device.h"
#include "src/cuda/driver.h"

// NVIDIA GPUs as bucket::Device. Any thread may make any call; the thread's own CUDA context stays
// as it was. A device uses its primary context, as CUDA's runtime does, so both share pointers,
// streams and events.
namespace rekindle::cuda {

struct DeviceSummary {
  // In this process: CUDA_VISIBLE_DEVICES renumbers the devices.
  int ordinal = 0;
  // As nvidia-smi prints it: "GPU-6f2c…", or "MIG-…" for a slice.
  std::string id;
  std::string name;
  std::uint64_t total_bytes = 0;
  // Why other processes cannot open its memory; "": they can.
  std::string not_shareable;
};

Result<std::vector<DeviceSummary>> list_devices(const Driver& driver);

// Retains the primary context. If no other code has, this takes some hundred MiB of the GPU's
// memory.
Result<std::unique_ptr<bucket::Device>> open_device(std::shared_ptr<const Driver> driver,
                                                    int ordinal);
// kNotFound: this process sees no such GPU.
Result<std::unique_ptr<bucket::Device>> open_device_by_id(std::shared_ptr<const Driver> driver,
                                                          std::string_view id);
// The device of the calling thread's current context; 0: the thread has none.
Result<int> current_device_ordinal(const Driver& driver);

}  // namespace rekindle::cuda
