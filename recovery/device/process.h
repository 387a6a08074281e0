#pragma once

#include "recovery/device/communicators.h"
#include "recovery/device/options.h"
#include "recovery/device/serving.h"
#include "src/base/unique_fd.h"
#include "src/bucket/pinned.h"

namespace rekindle::device {

struct DeviceProcessOptions {
  Doubles doubles;  // none: CUDA
  unsigned pin_threads = bucket::Pinner::kThreads;
  SessionTimes times;
  std::uint32_t slots = 3;
  double free_fraction = 0.1;       // of a device's free memory, for one session
  Communicators::Load collectives;  // none: of doubles, or by NCCL
};

// What `rekindle device-process` exits with when a device has failed for good.
inline constexpr int kDeviceLostExit = 70;

// The device process: serves the agent at the other end of `socket` (proto/device.proto) until that
// goes. An error: a device has failed for good, or the socket; exit then without destructors,
// because what the device does not give back would hold them up.
Result<void> run_device_process(UniqueFd socket, const DeviceProcessOptions& options);

}  // namespace rekindle::device
