#pragma once

#include "proto/coordinator.pb.h"
#include "src/store/segment_store.h"

namespace rekindle::agent {

// What an agent says of a committed copy.
proto::Holding make_holding(const store::StoredVersion& stored);

}  // namespace rekindle::agent
