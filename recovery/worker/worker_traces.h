#pragma once

#include "recovery/trace/tracer.h"
#include "recovery/worker/event_log.h"

namespace rekindle::worker {

// Leaves the spans of a committed or failed attach: the recovery of the rank, and its phases one
// after the other, with "restart" behind "detect". Other events leave none.
void record_recovery(trace::Tracer& tracer, const Event& event, TimePoint now);

}  // namespace rekindle::worker
