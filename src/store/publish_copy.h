#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "src/store/publish_sources.h"
#include "src/store/segment_store.h"
#include "src/store/store_state.h"
#include "src/store/write_watch.h"

namespace rekindle::store {

// Writes the manifest of the copy in `directory`, in one step.
Result<void> store_manifest(StoreState& state, const std::filesystem::path& directory,
                            const Manifest& manifest);

// The files of a publish in DIR/staging/RANDOM and the bytes that it has reserved. Destroyed
// without put_in_place(), both go.
class PublishCopy {
 public:
  static Result<std::unique_ptr<PublishCopy>> create(std::shared_ptr<StoreState> state,
                                                     const ModelVersion& id, std::uint64_t bytes);
  ~PublishCopy();
  PublishCopy(const PublishCopy&) = delete;
  PublishCopy& operator=(const PublishCopy&) = delete;

  // The next three make the next segment. This one makes a new file of this size, to be filled.
  Result<void> add_segment(const SegmentSpec& spec);
  // A file that shares the source's bytes until either is written to. False: the file system
  // cannot, and nothing was made.
  Result<bool> add_clone(const SegmentSpec& spec, const SourceFile& source);
  // The file of `filled` itself, under a new name. False: another process can still write to it, so
  // nothing was made. kCorrupt: it is `sealed`, and was opened for writing since. `sealed` may be
  // null.
  Result<bool> take_over(const SegmentSpec& spec, const std::shared_ptr<MappedSegment>& filled,
                         const SealedSegment* sealed);
  MappedSegment& segment(std::uint32_t index) { return *segments_[index]; }

  // kCorrupt: a process has opened a file for writing since it was taken over or made here.
  Result<void> check_unwritten() const;
  Result<void> write_manifest(const Manifest& manifest);
  // After write_manifest(), before put_in_place().
  Result<void> replace_manifest(const Manifest& manifest) {
    return store_manifest(*state_, directory_, manifest);
  }
  // Renames the directory with its manifest to where committed copies are.
  Result<std::shared_ptr<const StoredVersion>> put_in_place(const Manifest& manifest);

 private:
  void add_made(std::shared_ptr<MappedSegment> segment, std::unique_ptr<WatchedFile> watched);
  Result<void> close_for_writing();
  bool is_watched() const;

  PublishCopy(std::shared_ptr<StoreState> state, std::filesystem::path directory,
              std::uint64_t reserved_bytes);

  const std::shared_ptr<StoreState> state_;
  const std::filesystem::path directory_;
  const std::uint64_t reserved_bytes_;
  std::vector<std::shared_ptr<MappedSegment>> segments_;
  struct Leased {
    std::shared_ptr<MappedSegment> segment;
    std::uint64_t lease;
  };
  // The segments that were taken over, each under the lease of that moment. From write_manifest()
  // on the others as well, where there are leases.
  std::vector<Leased> leased_;
  // The segments that were made here. No other process may write to them from before their digests.
  std::vector<std::shared_ptr<MappedSegment>> made_;
  std::vector<std::unique_ptr<WatchedFile>> watched_;  // the file of each of made_
  bool moved_ = false;
};

class SegmentStore::Staged {
 public:
  Manifest manifest;
  std::unique_ptr<PublishCopy> copy;              // null when `existing` already holds it all
  std::shared_ptr<const StoredVersion> existing;  // a full copy with the same root
};

// kCorrupt: a writer has overwritten the header of its file. The header lay where the tensors of a
// filled segment were written.
Result<void> check_headers(const FilledSegments& filled, PublishCopy& copy);

class SegmentStore::StagedPart {
 public:
  ModelVersion id;
  TensorSet tensors;
  Layout layout;
  std::unique_ptr<PublishCopy> copy;
  std::map<TileIndex, Digest> leaves;  // of the sealed segments
};

// SegmentStore::stage, stage_segments, stage_part and finish_part.
Result<std::shared_ptr<SegmentStore::Staged>> stage_files(
    std::shared_ptr<StoreState> state, const ModelVersion& id,
    std::span<const std::filesystem::path> paths,
    const std::function<void(const PublishProgress&)>& progress);
Result<std::shared_ptr<SegmentStore::Staged>> stage_filled(
    std::shared_ptr<StoreState> state, const ModelVersion& id, FilledSegments filled,
    const std::function<void(const PublishProgress&)>& progress);
Result<std::shared_ptr<SegmentStore::StagedPart>> stage_part(std::shared_ptr<StoreState> state,
                                                             const ModelVersion& id,
                                                             FilledSegments filled);
Result<std::shared_ptr<SegmentStore::Staged>> finish_part(
    StoreState& state, std::shared_ptr<SegmentStore::StagedPart> part,
    std::shared_ptr<const Checkpoint> checkpoint, std::vector<PartDigest> part_digests,
    std::vector<Digest> part_layouts);
// SegmentStore::sign_staged.
Result<void> sign_staged(StoreState& state, SegmentStore::Staged& staged,
                         std::span<const VersionSignature> signatures);

}  // namespace rekindle::store
