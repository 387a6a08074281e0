#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "src/bucket/collective.h"

namespace rekindle::device {

// Wraps collectives so that an abort, also one by a destructor, takes at most `patience`: it runs
// on a thread of its own. An abort that takes longer is left to that thread, and `stuck` is called
// before abort() returns, on the caller's thread. A slow abort alone is no fault: NCCL waits until
// the other processes of this host have aborted, too, because its proxies share sockets. Ask the
// stream whether the queued work has ended.
using OnStuck = std::function<void(Error why)>;
std::unique_ptr<bucket::Collectives> bound_aborts(std::unique_ptr<bucket::Collectives> collectives,
                                                  std::chrono::milliseconds patience,
                                                  OnStuck stuck);

}  // namespace rekindle::device
