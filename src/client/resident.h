#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/base/unique_fd.h"
#include "src/bucket/device.h"

namespace rekindle::client {

// A block of a worker's device, with the device. The memory stays as long as this, or the agent's
// keeper, holds it.
struct WorkerBlock {
  std::shared_ptr<bucket::Device> device;
  std::unique_ptr<bucket::Block> block;
};

// The resident copy that came with an attach. It is opened once.
struct ResidentCopy {
  std::string description;
  std::vector<std::uint64_t> block_bytes;
  std::vector<UniqueFd> blocks;
  // Other workers read them, so this one maps them for reading.
  bool shared = false;
};

}  // namespace rekindle::client
