#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <sys/stat.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/tensor/layout.h"
#include "src/tensor/safetensors.h"

namespace rekindle::store {

class MappedSegment;

// One file that is published, held open from the moment its header was read.
struct SourceFile {
  std::filesystem::path path;
  UniqueFd fd;
  struct stat opened {};
  std::uint64_t data_offset_bytes = 0;

  std::uint64_t size_bytes() const { return static_cast<std::uint64_t>(opened.st_size); }
  // kCorrupt when the file was written to or truncated since it was opened.
  Result<void> check_unchanged() const;
};

// Everything that a publish reads. Weights files become segments as they are. The small files
// become one more segment, whose header is `files_header`.
struct PublishSources {
  std::vector<SourceFile> weights;
  std::vector<SourceFile> files;  // in the order of the files segment
  std::string files_header;       // empty when there is no files segment
  TensorSet tensors;
  Layout layout;
};

// Opens it for reading only, so the file can still be taken over.
Result<SourceFile> open_segment_as_source(const MappedSegment& segment);

// Opens and checks the checkpoint files at `paths`. kInvalid names the file.
Result<PublishSources> open_sources(std::span<const std::filesystem::path> paths);

}  // namespace rekindle::store
