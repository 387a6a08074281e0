#pragma once

#include <memory>
#include <string>

#include "src/bucket/device.h"

namespace rekindle::client {

// The device that a worker's weights shall land on, and the stream that reads the buckets.
struct WorkerDevice {
  std::unique_ptr<bucket::Device> device;
  std::unique_ptr<bucket::Stream> stream;
};

// `name` as in rk_attach_options.device; "cuda" is the calling thread's current device. kInvalid:
// no name of a device; kNotFound: this process sees no such GPU; kUnavailable: a build without
// CUDA.
Result<WorkerDevice> open_worker_device(const std::string& name, void* stream);

}  // namespace rekindle::client
