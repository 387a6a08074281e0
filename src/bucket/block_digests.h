#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// A block of memory of a device, in the hands of a process that may not have it open.
struct BlockFile {
  UniqueFd descriptor;
  std::uint64_t bytes = 0;
  // The part that matters. Length 0: all of it.
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// A block, or its part, is checked in pieces of this size; the last one may be shorter.
inline constexpr std::uint64_t kPieceBytes = kMostDigestedBytes;

// The BLAKE3 of each piece of the blocks, block by block, computed on the device. kInvalid: one is
// no block of this device, or has no such part. kTimeout: the device was not done by `deadline`;
// its work goes on, and the caller ends the process. Other errors: the device fails.
Result<std::vector<Digest>> digest_blocks(Device& device, std::span<const BlockFile> blocks,
                                          TimePoint deadline);

// Reads the part of a block, at most kPieceBytes, or writes `bytes` there. Errors as above.
Result<std::string> read_block(Device& device, const BlockFile& from, TimePoint deadline);
Result<void> write_block(Device& device, const BlockFile& to, std::string_view bytes,
                         TimePoint deadline);

}  // namespace rekindle::bucket
