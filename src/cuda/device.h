#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/bucket/device.h"
#include "src/cuda/driver.h"

// NVIDIA GPUs as bucket::Device. Every call may come from any thread and leaves the thread's own
// CUDA context as it was. A device uses its primary context, as CUDA's runtime does: pointers,
// streams and events are good for both.
namespace rekindle::cuda {

struct DeviceSummary {
  int ordinal = 0;  // in this process: CUDA_VISIBLE_DEVICES numbers them anew
  std::string id;   // as nvidia-smi prints it: "GPU-6f2c…", of a slice "MIG-…"
  std::string name;
  std::uint64_t total_bytes = 0;
  std::string not_shareable;  // why no other process can open its memory; "" when one can
};

Result<std::vector<DeviceSummary>> list_devices(const Driver& driver);

// Retains the primary context: some hundred MiB of the GPU's memory, when nobody else has.
Result<std::unique_ptr<bucket::Device>> open_device(std::shared_ptr<const Driver> driver,
                                                    int ordinal);
// kNotFound: this process sees no such GPU.
Result<std::unique_ptr<bucket::Device>> open_device_by_id(std::shared_ptr<const Driver> driver,
                                                          std::string_view id);
// Of the calling thread's current context; 0 when it has none.
Result<int> current_device_ordinal(const Driver& driver);

}  // namespace rekindle::cuda
