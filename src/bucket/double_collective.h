#pragma once

#include <cstdint>
#include <memory>

#include "src/bucket/collective.h"

namespace rekindle::bucket {

// Collectives of double devices, of this and other processes of the user on this host. They meet in
// a file of shared memory, which the id names and which disappears after all have met. As with
// NCCL, a rank whose peer is gone waits until it is aborted.
std::unique_ptr<Collectives> make_double_collectives();

// The number of chunks (of up to 512 KiB) by which an owner may be ahead of the slowest rank. They
// wait in staging areas, like the chunks in NCCL's buffers.
constexpr std::uint64_t kDoubleChunksAhead = 2;

}  // namespace rekindle::bucket
