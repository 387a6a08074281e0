#pragma once

#include <memory>
#include <string>

#include "src/bucket/device.h"

namespace rekindle::client {

// The device for a worker's weights, and the stream that reads the buckets.
struct WorkerDevice {
  std::unique_ptr<bucket::Device> device;
  std::unique_ptr<bucket::Stream> stream;
};

// `name` is as in rk_attach_options.device; "cuda" is the calling thread's current device.
// kInvalid: it does not name a device. kNotFound: this process sees no such GPU. kUnavailable: this
// is a build without CUDA.
Result<WorkerDevice> open_worker_device(const std::string& name, void* stream);

}  // namespace rekindle::client
