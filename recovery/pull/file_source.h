#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "src/base/result.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"

// The last rung of the ladder: a directory of safetensors files as a source.
namespace rekindle::pull {

struct FileSource {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const Layout> layout;
  std::vector<std::unique_ptr<store::MappedSegment>> files;  // as in the layout
  std::vector<std::span<const std::byte>> segments() const;
};

// The tensors of `known` that lie in `directory` with the same dtype and shape. Nothing is
// digested: the pull verifies every tile.
Result<std::shared_ptr<FileSource>> open_file_source(const std::filesystem::path& directory,
                                                     std::shared_ptr<const Checkpoint> known);

// When nobody can say what `id` consists of: takes the directory for it and digests everything.
Result<std::shared_ptr<FileSource>> adopt_file_source(const std::filesystem::path& directory,
                                                      const ModelVersion& id, WorkerPool& pool);

}  // namespace rekindle::pull
