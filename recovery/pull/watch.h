#pragma once

#include <filesystem>
#include <functional>
#include <memory>

#include "recovery/pull/slice_source.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

namespace rekindle::pull {

// A pull's copy once it has its place: its segments are DIRECTORY/NAME.partial until it is
// committed, then DIRECTORY/NAME, the same files. What is in `verified` stays as it is.
struct Arriving {
  std::shared_ptr<const Checkpoint> checkpoint;
  Layout layout;
  std::filesystem::path directory;
  std::shared_ptr<const VerifiedTiles> verified;
};

// For those who read a copy while it arrives. On the control thread.
struct PullWatch {
  std::function<void(Arriving)> on_begun;
};

}  // namespace rekindle::pull
