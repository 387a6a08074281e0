#pragma once

#include <filesystem>

#include <gtest/gtest.h>

#include "recovery/worker/publication_desk.h"
#include "src/store/segment_store.h"

namespace rekindle::worker {

// Publishes a version with one tensor, 'w', of so many rows of 1024 floats.
inline void publish_rows(store::SegmentStore& store, const std::filesystem::path& directory,
                         const ModelVersion& id, std::uint64_t rows) {
  const auto tensors = *TensorSet::create({{"w", DType::kF32, {rows, 1024}}});
  const auto files = Publication::begin(store, directory, id, tensors);
  ASSERT_TRUE(files) << files.error().message();
  auto staged = store.stage_segments(id, (*files)->filled(), {});
  ASSERT_TRUE(staged) << staged.error().message();
  ASSERT_TRUE(store.commit_staged(*staged));
}

}  // namespace rekindle::worker
