#pragma once

#include <optional>

#include "recovery/device/mailbox.h"
#include "recovery/device/worker_deliver.h"
#include "src/base/clock.h"

// How a session's thread waits: for its worker, for the control thread, for the device.
namespace rekindle::device {

// The device says nothing when it is done, it is asked: at once at first, then with pauses in
// proportion to how long it has taken already. nullopt: now.
std::optional<Duration> pause_before_asking(Duration quiet);

// Until one of them has something to say, at most this long. `worker` may be null: it is lost.
void sleep_for(Duration pause, const WorkerDeliver* worker, const Mailbox& mailbox);

}  // namespace rekindle::device
