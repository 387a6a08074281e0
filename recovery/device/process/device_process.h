#pragma once

#include "recovery/device/gpu_options.h"
#include "recovery/device/process/communicators.h"
#include "recovery/device/process/serving.h"
#include "src/base/unique_fd.h"
#include "src/bucket/pinned.h"

namespace rekindle::device {

struct DeviceProcessOptions {
  // None: the GPUs of the CUDA driver.
  Doubles doubles;
  unsigned pin_threads = bucket::Pinner::kThreads;
  SessionTimes times;
  std::uint32_t slots = 3;
  // Share of a device's free memory that one session may take.
  double free_fraction = 0.1;
  // Idle devices whose links one session may use.
  std::uint32_t helpers = GpuOptions::kAutoHelpers;
  // Empty: the collectives of doubles, or NCCL.
  Communicators::Load collectives;
};

// The device process: serves the agent at the other end of `socket` (proto/device.proto) until the
// agent is gone. An error: a device, or the socket, has failed for good. The caller then exits
// without destructors, because a device that gives nothing back would block them.
Result<void> run_device_process(UniqueFd socket, const DeviceProcessOptions& options);

}  // namespace rekindle::device
