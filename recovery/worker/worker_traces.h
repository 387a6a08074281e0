#pragma once

#include "recovery/trace/tracer.h"
#include "recovery/worker/event_log.h"

namespace rekindle::worker {

// Leaves the spans of an attach that has been committed: the recovery of the rank, and its phases
// one after the other. Other events leave none.
void record_recovery(trace::Tracer& tracer, const Event& event, TimePoint now);

}  // namespace rekindle::worker
