#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/store/segment_store.h"
#include "src/store/store_state.h"

namespace rekindle::store {

// Maps a committed copy and checks manifest, file sizes and headers (not the digests).
Result<StoredVersion> load_copy(const std::filesystem::path& directory, Evidence evidence);

// Fills the books from the disk: removes leftovers of publishes, finishes removals, adopts
// committed copies, counts half-done pulls. What cannot be read is logged, counted and left alone.
Result<void> scan_store(StoreState& state);

}  // namespace rekindle::store
