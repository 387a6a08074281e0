#pragma once

#include <memory>

#include "src/bucket/collective.h"

namespace rekindle::bucket {

// Of double devices, of this and other processes of the user on this host: they meet in a file of
// shared memory, which the id names and which is gone when all have met. As with NCCL, a rank
// whose peer is gone waits until it is aborted.
std::unique_ptr<Collectives> make_double_collectives();

}  // namespace rekindle::bucket
