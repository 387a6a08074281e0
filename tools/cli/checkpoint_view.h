#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace rekindle::cli {

// The facts that `inspect` shows of a safetensors file, a checkpoint directory or a copy in a
// store.
struct CheckpointView {
  struct Line {
    std::string name;
    std::string dtype;
    std::string shape;
    // "": the whole tensor.
    std::string box;
    std::string file;
    std::uint64_t bytes = 0;
  };
  // "safetensors" or "store copy".
  std::string kind;
  std::vector<Line> tensors;
  // Name and size.
  std::vector<std::pair<std::string, std::uint64_t>> files;
  // The small files: config.json, …
  std::vector<std::string> extras;
  Digest tensor_set;
  Digest layout;
  std::uint64_t tensor_bytes = 0;
  // Of a copy in a store only.
  std::optional<ModelVersion> id;
  std::optional<Digest> root;
  // It has every tensor of the checkpoint, completely.
  bool whole = true;
};

Result<CheckpointView> view_checkpoint(const std::filesystem::path& path);
// Whether the path is the directory of a copy, or its manifest.
bool is_store_copy(const std::filesystem::path& path);

}  // namespace rekindle::cli
