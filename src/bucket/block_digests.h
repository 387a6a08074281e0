#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// A block of memory of a device, in the hands of a process that may not have it open.
struct BlockFile {
  UniqueFd descriptor;
  std::uint64_t bytes = 0;
};

// A block is checked in pieces of this size; its last one may be shorter.
inline constexpr std::uint64_t kPieceBytes = kMostDigestedBytes;

// The BLAKE3 of each piece of the blocks, block by block, computed on the device. kInvalid: one is
// no block of this device. kTimeout: the device was not done by `deadline`; its work goes on, and
// the caller ends the process. Other errors: the device fails.
Result<std::vector<Digest>> digest_blocks(Device& device, std::span<const BlockFile> blocks,
                                          TimePoint deadline);

}  // namespace rekindle::bucket
