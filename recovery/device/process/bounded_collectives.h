#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "src/bucket/collective.h"

namespace rekindle::device {

// Collectives whose aborts, also those by destructors, take no longer than `patience`: each is done
// on a thread of its own. One that takes longer is left to it, and `stuck` is called, on the thread
// that aborts and before the abort returns. That alone is no fault: NCCL's waits until the other
// processes of this host have let go, too (its proxies share sockets). Whether what was queued has
// ended is to be asked of the stream.
using OnStuck = std::function<void(Error why)>;
std::unique_ptr<bucket::Collectives> bound_aborts(std::unique_ptr<bucket::Collectives> collectives,
                                                  std::chrono::milliseconds patience,
                                                  OnStuck stuck);

}  // namespace rekindle::device
