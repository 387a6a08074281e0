#pragma once

#include "proto/coordinator.pb.h"
#include "recovery/agent/served_versions.h"

namespace rekindle::agent {

// What an agent says of a copy; of one that is being filled, what it holds as of now, or most of
// it.
proto::Holding make_holding(const Served& served);

}  // namespace rekindle::agent
