#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/store/files.h"
#include "src/store/later_pages.h"
#include "src/store/resume_file.h"
#include "src/store/segment_store.h"
#include "src/store/store_state.h"
#include "src/store/write_watch.h"
#include "src/tensor/held_tile.h"

namespace rekindle::store {

// A pull's copy on its way. Owns the claim on its directory. Without commit or discard the files
// stay for the next begin().
class PullCopy final : public PendingVersion {
 public:
  static Result<std::unique_ptr<PullCopy>> begin(std::shared_ptr<StoreState> state,
                                                 std::shared_ptr<const Checkpoint> checkpoint,
                                                 PackedLayout packed, int preferred_node);
  ~PullCopy() override;

  const Manifest& manifest() const override { return manifest_; }
  std::span<std::byte> segment(std::uint32_t index) override {
    return segments_[index]->writable();
  }
  std::shared_ptr<const MappedSegment> mapped(std::uint32_t index) const override {
    return segments_[index];
  }
  const TileSet& verified() const override { return marks_.verified(); }
  void keep_proof(TileIndex tile, const Box& box, std::string_view proof) override;
  void mark_verified(TileIndex tile) override;
  Result<void> check_sizes() const override;
  Error access_error() const override;
  const std::filesystem::path& directory() const override { return directory_; }

  Result<std::shared_ptr<const StoredVersion>> commit();
  void discard();

 private:
  PullCopy(std::shared_ptr<StoreState> state, Manifest manifest, std::filesystem::path directory,
           int preferred_node);
  Result<void> prepare(std::span<const std::string> headers);
  Result<void> reopen();
  Result<void> write_manifest(AfterPowerCut after);
  Result<void> take_pooled();
  Result<void> create_segment(std::uint32_t index, std::string_view header);
  // The processes that have written to the files since begin().
  enum class Writers {
    kNone,
    kUnknown,
    kOthers,  // or another process may write now
  };
  Writers writers() const;
  void close_for_writing();
  bool take_leases();
  void record(Verification& verification) const;
  Result<void> sync_segments() const;
  Result<void> put_in_place();
  std::filesystem::path partial_path(std::uint32_t segment) const;

  const std::shared_ptr<StoreState> state_;
  Manifest manifest_;
  const std::filesystem::path directory_;
  const int preferred_node_;  // of SegmentStore::begin()
  TileMarks marks_;
  std::vector<std::shared_ptr<MappedSegment>> segments_;
  std::vector<std::unique_ptr<WatchedFile>> watched_;  // the file of each segment
  std::vector<std::uint64_t> leases_;                  // of each segment; taken by commit()
  bool resumed_ = false;                               // an earlier attempt left files of this copy
  bool released_ = false;                              // the claim has ended
  std::unique_ptr<LaterPages> later_pages_;            // of the segments; null: all are there
};

}  // namespace rekindle::store
