#pragma once

#include "proto/coordinator.pb.h"
#include "recovery/coordinator/core/core.h"

namespace rekindle::coordinator {

// The answer for `rekindle status`.
proto::ClusterStatusResponse make_status(const Core& core, TimePoint now);

}  // namespace rekindle::coordinator
