#pragma once

#include <cstdint>
#include <memory>

#include "src/bucket/collective.h"

namespace rekindle::bucket {

// Of double devices, of this and other processes of the user on this host: they meet in a file of
// shared memory, which the id names and which is gone when all have met. As with NCCL, a rank
// whose peer is gone waits until it is aborted.
std::unique_ptr<Collectives> make_double_collectives();

// By how many chunks of its share, 512 KiB each or what is left of it, an owner may be ahead of the
// rank that is furthest behind: they wait in staging areas, as NCCL's do in its buffers.
constexpr std::uint64_t kDoubleChunksAhead = 2;

}  // namespace rekindle::bucket
