#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "src/base/result.h"

namespace rekindle::cli {

struct SampleModel {
  std::size_t tensors = 0;
  std::size_t files = 0;
  std::uint64_t bytes = 0;
};

// Writes a checkpoint with the names and shapes of Qwen3-4B, with as many layers as fit into
// `wanted_bytes`, and pseudo-random contents that follow from `seed`. Fails like the file system
// does.
Result<SampleModel> make_sample_model(const std::filesystem::path& directory,
                                      std::uint64_t wanted_bytes, std::uint64_t seed);

}  // namespace rekindle::cli
