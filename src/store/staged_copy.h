#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "src/store/publish_sources.h"
#include "src/store/segment_store.h"
#include "src/store/store_state.h"

namespace rekindle::store {

// The files of a publish in DIR/staging/RANDOM and the bytes that it has reserved. Destroyed
// without put_in_place(), both go.
class StagedCopy {
 public:
  static Result<std::unique_ptr<StagedCopy>> create(std::shared_ptr<StoreState> state,
                                                    const ModelVersion& id, std::uint64_t bytes);
  ~StagedCopy();
  StagedCopy(const StagedCopy&) = delete;
  StagedCopy& operator=(const StagedCopy&) = delete;

  // Makes the next segment: a link to the source where allowed and possible (false), else a new
  // file of this size that has to be filled (true).
  Result<bool> add_segment(const SegmentSpec& spec, const SourceFile* link_source);
  MappedSegment& segment(std::uint32_t index) { return *segments_[index]; }

  Result<void> write_manifest(const Manifest& manifest);
  // Renames the directory with its manifest to where committed copies are.
  Result<std::shared_ptr<const StoredVersion>> put_in_place(const Manifest& manifest);

 private:
  StagedCopy(std::shared_ptr<StoreState> state, std::filesystem::path directory,
             std::uint64_t reserved_bytes);
  bool may_link(const SourceFile& source) const;

  const std::shared_ptr<StoreState> state_;
  const std::filesystem::path directory_;
  const std::uint64_t reserved_bytes_;
  std::vector<std::shared_ptr<MappedSegment>> segments_;
  bool moved_ = false;
};

class SegmentStore::Staged {
 public:
  Manifest manifest;
  std::unique_ptr<StagedCopy> copy;               // null when `existing` already holds it all
  std::shared_ptr<const StoredVersion> existing;  // a full copy with the same root
};

// SegmentStore::stage.
Result<std::shared_ptr<SegmentStore::Staged>> stage_copy(
    std::shared_ptr<StoreState> state, const ModelVersion& id,
    std::span<const std::filesystem::path> paths, Adopt adopt,
    const std::function<void(const PublishProgress&)>& progress);

}  // namespace rekindle::store
