#pragma once

#include <memory>
#include <string>

#include "src/bucket/device.h"

namespace rekindle::testing {

// The device of a worker under test and the stream on which it reads buckets. Throws
// std::runtime_error.
class ClientDevice {
 public:
  static std::unique_ptr<ClientDevice> open(const std::string& name);  // "cuda:1", "double:0"
  virtual ~ClientDevice() = default;
  virtual bucket::Device& device() = 0;
  virtual bucket::Stream& stream() = 0;
  virtual void* native_stream() const = 0;  // the CUstream; of a double null
};

}  // namespace rekindle::testing
