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

// What `inspect` shows of a safetensors file, a checkpoint directory or a copy in a store.
struct CheckpointView {
  struct Line {
    std::string name;
    std::string dtype;
    std::string shape;
    std::string box;  // "" = the whole tensor
    std::string file;
    std::uint64_t bytes = 0;
  };
  std::string kind;  // "safetensors", "store copy"
  std::vector<Line> tensors;
  std::vector<std::pair<std::string, std::uint64_t>> files;  // name, size
  std::vector<std::string> extras;                           // config.json, …
  Digest tensor_set;
  Digest layout;
  std::uint64_t tensor_bytes = 0;
  // Of a copy in a store only.
  std::optional<ModelVersion> id;
  std::optional<Digest> root;
  bool whole = true;  // every tensor of the checkpoint, completely
};

Result<CheckpointView> view_checkpoint(const std::filesystem::path& path);
// A copy's directory, or its manifest.
bool is_store_copy(const std::filesystem::path& path);

}  // namespace rekindle::cli
