#include "src/store/pull_copy.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/mman.h>
#include <sys/statvfs.h>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/store/fault_guard.h"
#include "src/store/files.h"
#include "src/store/store_directory.h"

namespace rekindle::store {

PullCopy::PullCopy(std::shared_ptr<StoreState> state, Manifest manifest, fs::path directory,
                   int preferred_node)
    : state_(std::move(state)),
      manifest_(std::move(manifest)),
      directory_(std::move(directory)),
      preferred_node_(preferred_node),
      marks_(manifest_, directory_, [this](const LayoutEntry& entry) -> std::span<const std::byte> {
        const TensorInfo& tensor = manifest_.checkpoint->tensors[entry.tensor];
        return segments_[entry.segment]->bytes().subspan(
            entry.offset_bytes, entry.box.elements() * dtype_size_bytes(tensor.dtype));
      }) {}

void PullCopy::keep_proof(TileIndex tile, const Box& box, std::string_view proof) {
  marks_.keep_proof(tile, box, proof);
}

void PullCopy::mark_verified(TileIndex tile) {
  if (marks_.mark(tile) && writers() == Writers::kOthers) marks_.distrust_part(tile);
}

PullCopy::~PullCopy() {
  later_pages_.reset();
  if (released_) return;
  // A resume must not rely on digests of bytes that another process has written.
  if (marks_.is_open() && writers() == Writers::kOthers) marks_.distrust_all_parts();
  state_->release(directory_, manifest_.checkpoint->id, disk_bytes(directory_));
}

Result<std::unique_ptr<PullCopy>> PullCopy::begin(std::shared_ptr<StoreState> state,
                                                  std::shared_ptr<const Checkpoint> checkpoint,
                                                  PackedLayout packed, int preferred_node) {
  const ModelVersion& id = checkpoint->id;
  if (packed.layout.tensor_set_digest() != checkpoint->tensors.digest() ||
      packed.headers.size() != packed.layout.segments().size()) {
    return fail(ErrorCode::kInvalid, "{}: the layout belongs to other tensors", id.to_string());
  }
  const fs::path directory = copy_directory(state->directory(), id, packed.layout.digest());
  TRY_VOID(state->claim(directory, id, checkpoint->root, packed.layout.segment_bytes()));
  Manifest manifest{std::move(checkpoint), std::move(packed.layout), state->next_generation(), {}};
  std::unique_ptr<PullCopy> copy(
      new PullCopy(std::move(state), std::move(manifest), directory, preferred_node));
  if (auto prepared = copy->prepare(packed.headers); !prepared) {
    copy->later_pages_.reset();
    // Gives the space back at once, unless it has bytes of an earlier attempt.
    if (!copy->resumed_) {
      if (auto removed = remove_copy(directory, copy->state_->pool(), Deletion::kLater); !removed) {
        log::warn("store.clean", "directory", directory.string(), "error", removed.error());
      }
    }
    return fail(std::move(prepared).error());
  }
  return copy;
}

fs::path PullCopy::partial_path(std::uint32_t segment) const {
  return directory_ / (manifest_.layout.segments()[segment].name + std::string(kPartialSuffix));
}

Result<void> PullCopy::prepare(std::span<const std::string> headers) {
  TRY_VOID(make_directory(directory_.parent_path()));
  TRY_VOID(make_directory(directory_));
  TRY_VOID(failpoint("store.begin.after_mkdir"));
  resumed_ = marks_.file_matches();
  if (resumed_) {
    TRY_VOID(reopen());
  } else {
    // The files here belong to another root, or their begin() did not finish.
    TRY_VOID(remove_copy(directory_, state_->pool(), Deletion::kLater));
    TRY_VOID(make_directory(directory_.parent_path()));
    TRY_VOID(make_directory(directory_));
  }
  // Until the commit, which writes it again, only its name matters.
  TRY_VOID(write_manifest(AfterPowerCut::kAnything));
  TRY_VOID(failpoint("store.begin.after_manifest"));
  TRY_VOID(take_pooled());
  for (std::uint32_t i = 0; i < headers.size(); ++i) TRY_VOID(create_segment(i, headers[i]));
  if (!resumed_) {
    std::uint64_t bytes = 0;
    for (const auto& segment : segments_) bytes += segment->bytes().size();
    TRY(later_pages_, state_->pool().with_room(bytes, [&] {
      return LaterPages::begin(segments_, state_->promised_bytes());
    }));
  }
  TRY_VOID(failpoint("store.begin.after_segments"));
  // Without this file no tile counts as verified, also if a pooled segment has its bytes.
  TRY_VOID(state_->pool().with_room(0, [&] { return marks_.open(); }));
  TRY_VOID(failpoint("store.begin.after_resume"));
  return resumed_ ? marks_.verify() : Result<void>();
}

Result<void> PullCopy::write_manifest(AfterPowerCut after) {
  const std::string bytes = manifest_.serialize();
  return state_->pool().with_room(bytes.size(), [&] {
    return write_file_atomically(directory_ / kPartialManifestName, bytes, after);
  });
}

// Comes before the first new file, which may need the room of the pool's files.
Result<void> PullCopy::take_pooled() {
  for (std::uint32_t i = 0; i < manifest_.layout.segments().size(); ++i) {
    TRY_VOID(state_->pool().take(partial_path(i), manifest_.layout.segments()[i].size_bytes,
                                 preferred_node_));
  }
  return {};
}

// Takes back the steps of a commit that did not finish.
Result<void> PullCopy::reopen() {
  std::error_code ignored;
  if (fs::exists(directory_ / kManifestName, ignored)) {
    TRY_VOID(rename_file(directory_ / kManifestName, directory_ / kPartialManifestName));
    // Before the bytes below that manifest change.
    TRY_VOID(sync_directory(directory_));
  }
  for (std::uint32_t i = 0; i < manifest_.layout.segments().size(); ++i) {
    const fs::path final_path = directory_ / manifest_.layout.segments()[i].name;
    if (fs::exists(final_path, ignored)) TRY_VOID(rename_file(final_path, partial_path(i)));
  }
  return {};
}

Result<void> PullCopy::create_segment(std::uint32_t index, std::string_view header) {
  const SegmentSpec& spec = manifest_.layout.segments()[index];
  if (header.size() > spec.size_bytes) {
    return fail(ErrorCode::kInvalid, "segment '{}' has {} bytes, its header {}", spec.name,
                spec.size_bytes, header.size());
  }
  TRY(auto segment,
      state_->pool().create(partial_path(index), spec.size_bytes, state_->room_bytes(),
                            {.preferred_node = preferred_node_, .later = !resumed_}));
  watched_.push_back(state_->write_watch().add(segment->fd(), segment->path()));
  const auto bytes = segment->writable();
  TRY_VOID(guard_mapping_access(spec.name.c_str(),
                                [&] { std::memcpy(bytes.data(), header.data(), header.size()); }));
  segments_.push_back(std::move(segment));
  return failpoint("store.begin.after_segment");
}

Result<void> PullCopy::check_sizes() const {
  for (const auto& segment : segments_) {
    if (const auto whole = segment->check_size(); !whole) {
      return fail(ErrorCode::kInternal,
                  "{} while it was filled: another process changed it; leave {} alone and start "
                  "the same command again",
                  whole.error().message(), directory_.string());
    }
  }
  return {};
}

Error PullCopy::access_error() const {
  if (const auto whole = check_sizes(); !whole) return whole.error();
  struct statvfs status {};
  if (::statvfs(directory_.c_str(), &status) == 0 && status.f_bavail == 0) {
    return {ErrorCode::kExhausted,
            fmt::format("the files in {} cannot be written: their file system is full; free some "
                        "space and start the same command again",
                        directory_.string())};
  }
  return {ErrorCode::kInternal,
          fmt::format("the files in {} cannot be read or written: their device fails; see dmesg, "
                      "or choose another directory",
                      directory_.string())};
}

// A process that the files were lent to closes them when it likes. Where stamps alone are the
// evidence, this process itself may have opened them for writing.
PullCopy::Writers PullCopy::writers() const {
  const bool maybe_ours = state_->evidence() == Evidence::kStamps;
  const auto seen = state_->write_watch().seen(watched_);
  Writers all = Writers::kNone;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const bool closed = seen[i].closed && !segments_[i]->lent_for_writing();
    if (seen[i].written || (closed && !maybe_ours)) return Writers::kOthers;
    if (!seen[i].watched || closed) all = Writers::kUnknown;
  }
  return all;
}

void PullCopy::close_for_writing() {
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    if (auto given_up = make_read_only(*segments_[i], *watched_[i]); !given_up) {
      log::warn("store.commit", "file", segments_[i]->path().string(), "error", given_up.error(),
                "action", "this process keeps it open for writing");
    }
  }
}

// False: another process has a file open or mapped for writing.
bool PullCopy::take_leases() {
  leases_.assign(segments_.size(), 0);
  if (state_->evidence() == Evidence::kStamps) return true;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const auto lease = segments_[i]->lease();
    if (!lease) return false;
    leases_[i] = *lease;
  }
  return true;
}

Result<void> PullCopy::sync_segments() const {
  TRY_VOID(check_sizes());
  for (const auto& segment : segments_) {
    if (!is_memory_backed(segment->fd()) && ::fdatasync(segment->fd()) != 0) {
      return fail_errno(errno, fmt::format("sync {}", segment->path().string()));
    }
  }
  return {};
}

// Up to the rename of the manifest a failure leaves a pull that can be resumed.
Result<void> PullCopy::put_in_place() {
  TRY_VOID(write_manifest(AfterPowerCut::kWhole));
  TRY_VOID(failpoint("store.commit.after_manifest"));
  for (std::uint32_t i = 0; i < segments_.size(); ++i) {
    TRY_VOID(rename_file(partial_path(i), directory_ / manifest_.layout.segments()[i].name));
    TRY_VOID(failpoint("store.commit.between_segments"));
  }
  TRY_VOID(sync_directory(directory_));
  TRY_VOID(failpoint("store.commit.before_manifest_rename"));
  return rename_file(directory_ / kPartialManifestName, directory_ / kManifestName);
}

// First this process gives up its own ways to write. With the leases no other process has one.
// Their earlier writes are then known, and later ones end a lease.
Result<std::shared_ptr<const StoredVersion>> PullCopy::commit() {
  TRY_VOID(marks_.check_complete());
  TRY_VOID(failpoint("store.commit.start"));
  later_pages_.reset();
  TRY_VOID(sync_segments());
  close_for_writing();
  const Writers before = take_leases() ? writers() : Writers::kOthers;
  TRY(TileMarks::Parts parts, marks_.parts());
  manifest_.part_digests = std::move(parts.digests);
  manifest_.part_proofs = std::move(parts.proofs);
  if (before == Writers::kOthers) {
    marks_.distrust_all_parts();
    log::warn("store.commit", "directory", directory_.string(), "error",
              "another process has opened its files for writing", "action",
              "its tiles are read again before anybody uses them");
    // Without a digest they do not verify, so they are fetched again.
    manifest_.part_digests.clear();
    manifest_.part_proofs.clear();
  }
  TRY_VOID(put_in_place());
  // Committed: the next open repairs failures from here on.
  const auto finish = [&]() -> Result<void> {
    TRY_VOID(failpoint("store.commit.after_manifest_rename"));
    TRY_VOID(sync_directory(directory_));
    TRY_VOID(sync_directory(directory_.parent_path()));
    TRY_VOID(sync_directory(state_->directory() / kModelsName));
    return unlink_if_present(directory_ / kResumeName);
  };
  if (auto finished = finish(); !finished) {
    log::warn("store.commit", "directory", directory_.string(), "error", finished.error());
  }
  for (const auto& segment : segments_) segment->path_.replace_extension();  // ".partial"
  auto version =
      std::make_shared<StoredVersion>(manifest_, segments_, directory_, state_->evidence());
  if (before == Writers::kNone) record(*version->verification);
  segments_.clear();
  watched_.clear();
  released_ = true;
  state_->commit(version);
  return version;
}

// Records that the copy is verified, if no process has written to its files since they were
// digested.
void PullCopy::record(Verification& verification) const {
  const auto now = verification.stamp();
  if (!now || writers() != Writers::kNone) return;
  for (std::size_t i = 0; i < leases_.size(); ++i) {
    if (leases_[i] != 0 && (*now)[i].lease != leases_[i]) return;
  }
  (void)verification.record(*now);
}

void PullCopy::discard() {
  later_pages_.reset();
  if (writers() == Writers::kOthers) {  // they may write again
    for (const auto& segment : segments_) state_->pool().give_up(*segment);
  }
  watched_.clear();
  segments_.clear();  // the last mapping of a file without a name frees its memory
  if (auto removed = remove_copy(directory_, state_->pool(), Deletion::kLater); !removed) {
    log::warn("store.discard", "directory", directory_.string(), "error", removed.error());
  }
}

}  // namespace rekindle::store
