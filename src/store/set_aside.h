#pragma once

#include <span>

#include "src/store/store_state.h"

namespace rekindle::store {

// SegmentStore::set_aside().
Result<SetAside> set_aside(StoreState& state, const StoredVersion& copy,
                           std::span<const TileIndex> bad);

}  // namespace rekindle::store
