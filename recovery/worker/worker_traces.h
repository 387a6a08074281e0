#pragma once

#include <cstdint>
#include <optional>

#include "recovery/trace/tracer.h"
#include "recovery/worker/event_log.h"

namespace rekindle::worker {

// Leaves the spans of a committed or failed attach: the recovery of the rank, and its phases one
// after the other, with "restart" behind "detect". Other events leave none.
void record_recovery(trace::Tracer& tracer, const Event& event, TimePoint now);

// Whether the rank whose worker was seen dead `gone` ago was wanted until its next worker, whose
// process has this age, attached. `rekindle run` begins the next process within its --max-backoff.
bool was_wanted(Duration gone, std::optional<Duration> age);

}  // namespace rekindle::worker
