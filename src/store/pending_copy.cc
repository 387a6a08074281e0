#include "src/store/pending_copy.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include <sys/mman.h>
#include <sys/statvfs.h>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/worker_pool.h"
#include "src/store/fault_guard.h"
#include "src/store/files.h"
#include "src/store/store_directory.h"

namespace rekindle::store {

std::size_t store_threads() {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 32);
}

PendingCopy::PendingCopy(std::shared_ptr<StoreState> state, Manifest manifest, fs::path directory)
    : state_(std::move(state)),
      manifest_(std::move(manifest)),
      directory_(std::move(directory)),
      tiles_(tiles_of_layout(*manifest_.checkpoint, manifest_.layout)),
      array_of_([this](const LayoutEntry& entry) -> std::span<const std::byte> {
        const TensorInfo& tensor = manifest_.checkpoint->tensors[entry.tensor];
        return segments_[entry.segment]->bytes().subspan(
            entry.offset_bytes, entry.box.elements() * dtype_size_bytes(tensor.dtype));
      }),
      verified_(manifest_.checkpoint->tiles.tile_count()) {}

PendingCopy::~PendingCopy() {
  if (released_) return;
  // A resume must not rely on digests of bytes that another process has written.
  if (resume_ != nullptr && writers() == Writers::kOthers) distrust_all_parts();
  state_->release(directory_, manifest_.checkpoint->id, disk_bytes(directory_));
}

Result<std::unique_ptr<PendingCopy>> PendingCopy::begin(
    std::shared_ptr<StoreState> state, std::shared_ptr<const Checkpoint> checkpoint,
    PackedLayout packed) {
  const ModelVersion& id = checkpoint->id;
  if (packed.layout.tensor_set_digest() != checkpoint->tensors.digest() ||
      packed.headers.size() != packed.layout.segments().size()) {
    return fail(ErrorCode::kInvalid, "{}: the layout belongs to other tensors", id.to_string());
  }
  const fs::path directory = copy_directory(state->directory(), id, packed.layout.digest());
  TRY_VOID(state->claim(directory, id, checkpoint->root, packed.layout.segment_bytes()));
  Manifest manifest{std::move(checkpoint), std::move(packed.layout), state->next_generation(), {}};
  std::unique_ptr<PendingCopy> copy(
      new PendingCopy(std::move(state), std::move(manifest), directory));
  if (auto prepared = copy->prepare(packed.headers); !prepared) {
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

ResumeIdentity PendingCopy::identity() const {
  return {manifest_.checkpoint->root, manifest_.layout.digest(),
          manifest_.checkpoint->tiles.tile_count(), tiles_.partial};
}

fs::path PendingCopy::partial_path(std::uint32_t segment) const {
  return directory_ / (manifest_.layout.segments()[segment].name + std::string(kPartialSuffix));
}

Result<void> PendingCopy::prepare(std::span<const std::string> headers) {
  TRY_VOID(make_directory(directory_.parent_path()));
  TRY_VOID(make_directory(directory_));
  TRY_VOID(failpoint("store.begin.after_mkdir"));
  resumed_ = ResumeFile::matches(directory_ / kResumeName, identity());
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
  TRY_VOID(failpoint("store.begin.after_segments"));
  // Without this file no tile counts as verified, also if a pooled segment has its bytes.
  TRY(resume_, state_->pool().with_room(
                   0, [&] { return ResumeFile::open(directory_ / kResumeName, identity()); }));
  TRY_VOID(failpoint("store.begin.after_resume"));
  if (resumed_) TRY_VOID(verify_marked());
  return {};
}

Result<void> PendingCopy::write_manifest(AfterPowerCut after) {
  const std::string bytes = manifest_.serialize();
  return state_->pool().with_room(bytes.size(), [&] {
    return write_file_atomically(directory_ / kPartialManifestName, bytes, after);
  });
}

// Comes before the first new file, which may need the room of the pool's files.
Result<void> PendingCopy::take_pooled() {
  for (std::uint32_t i = 0; i < manifest_.layout.segments().size(); ++i) {
    TRY_VOID(state_->pool().take(partial_path(i), manifest_.layout.segments()[i].size_bytes));
  }
  return {};
}

// Takes back the steps of a commit that did not finish.
Result<void> PendingCopy::reopen() {
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

Result<void> PendingCopy::create_segment(std::uint32_t index, std::string_view header) {
  const SegmentSpec& spec = manifest_.layout.segments()[index];
  if (header.size() > spec.size_bytes) {
    return fail(ErrorCode::kInvalid, "segment '{}' has {} bytes, its header {}", spec.name,
                spec.size_bytes, header.size());
  }
  TRY(auto segment,
      state_->pool().create(partial_path(index), spec.size_bytes, state_->room_bytes()));
  watched_.push_back(state_->write_watch().add(segment->fd(), segment->path()));
  const auto bytes = segment->writable();
  TRY_VOID(guard_mapping_access(spec.name.c_str(),
                                [&] { std::memcpy(bytes.data(), header.data(), header.size()); }));
  segments_.push_back(std::move(segment));
  return failpoint("store.begin.after_segment");
}

bool PendingCopy::still_verifies(TileIndex tile) const {
  const Checkpoint& checkpoint = *manifest_.checkpoint;
  bool good = false;
  const auto read = guard_mapping_access("segment", [&] {
    if (tiles_.is_partial(tile)) {
      good = resume_->partial_digest(tile) ==
             part_digest(checkpoint, manifest_.layout, tile, array_of_);
    } else {
      const auto digest = whole_tile_digest(checkpoint, manifest_.layout, tile, array_of_);
      good = digest && *digest == checkpoint.tile_digests[tile];
    }
  });
  return read && good;
}

Result<void> PendingCopy::verify_marked() {
  auto found = resume_->marked();
  if (!found) return fail(cut_resume_file());
  verified_ = std::move(*found);
  const std::vector<TileIndex> marked = verified_.tiles();
  std::vector<char> good(marked.size());  // not vector<bool>: written from several threads
  {
    WorkerPool pool("rk-store", store_threads(), 64);
    pool.parallel_for(marked.size(), [&](std::size_t i) {
      good[i] = tiles_.held.test(marked[i]) && still_verifies(marked[i]) ? 1 : 0;
    });
  }
  std::size_t lost = 0;
  const auto cleared = guard_mapping_access(kResumeName.data(), [&] {
    for (std::size_t i = 0; i < marked.size(); ++i) {
      if (good[i] != 0) continue;
      verified_.reset(marked[i]);
      resume_->clear(marked[i]);
      ++lost;
    }
  });
  if (!cleared) return fail(cut_resume_file());
  log::info("store.resume", "version", manifest_.checkpoint->id.to_string(), "tiles_kept",
            marked.size() - lost, "tiles_lost", lost);
  return {};
}

void PendingCopy::mark_verified(TileIndex tile) {
  if (tile >= tiles_.held.size() || !tiles_.held.test(tile)) return;
  const auto marked = guard_mapping_access("a file of the copy", [&] {
    if (tiles_.is_partial(tile)) {
      resume_->mark_partial(tile,
                            part_digest(*manifest_.checkpoint, manifest_.layout, tile, array_of_));
    } else {
      resume_->mark(tile);
    }
  });
  if (!marked) {
    log::warn("store.mark", "directory", directory_.string(), "tile", tile, "error",
              marked.error());
  }
  if (tiles_.is_partial(tile) && writers() == Writers::kOthers) distrust_part(tile);
}

Result<void> PendingCopy::check_sizes() const {
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

Error PendingCopy::access_error() const {
  if (const auto whole = check_sizes(); !whole) return whole.error();
  struct statvfs status {};
  if (::statvfs(directory_.c_str(), &status) == 0 && status.f_bavail == 0) {
    return {ErrorCode::kExhausted,
            fmt::format("the files in {} cannot be written: their file system is full, though the "
                        "space was reserved; free some and start the same command again",
                        directory_.string())};
  }
  return {ErrorCode::kInternal,
          fmt::format("the files in {} cannot be read or written: their device fails; see dmesg, "
                      "or choose another directory",
                      directory_.string())};
}

Error PendingCopy::cut_resume_file() const {
  return {ErrorCode::kInternal,
          fmt::format("{} was truncated while {} was filled: another process changed it; leave {} "
                      "alone and start the same command again",
                      (directory_ / kResumeName).string(), manifest_.checkpoint->id.to_string(),
                      directory_.string())};
}

// A process that the files were lent to closes them when it likes. Where stamps alone are the
// evidence, this process itself may have opened them for writing.
PendingCopy::Writers PendingCopy::writers() const {
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

void PendingCopy::close_for_writing() {
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    if (auto given_up = make_read_only(*segments_[i], *watched_[i]); !given_up) {
      log::warn("store.commit", "file", segments_[i]->path().string(), "error", given_up.error(),
                "action", "this process keeps it open for writing");
    }
  }
}

// False: another process has a file open or mapped for writing.
bool PendingCopy::take_leases() {
  leases_.assign(segments_.size(), 0);
  if (state_->evidence() == Evidence::kStamps) return true;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const auto lease = segments_[i]->lease();
    if (!lease) return false;
    leases_[i] = *lease;
  }
  return true;
}

// A part of a tile has only the digest that this process computed from the file. If another process
// wrote to the file before, it is the digest of wrong bytes.
void PendingCopy::distrust_all_parts() { forget_digests(tiles_.partial); }

// Distrusts all of them only once; every later part comes here as well.
void PendingCopy::distrust_part(TileIndex newest) {
  if (!parts_distrusted_.exchange(true)) return distrust_all_parts();
  forget_digests({&newest, 1});
}

void PendingCopy::forget_digests(std::span<const TileIndex> tiles) {
  const auto forgotten = guard_mapping_access(kResumeName.data(), [&] {
    for (const TileIndex tile : tiles) resume_->forget_partial_digest(tile);
  });
  if (!forgotten) {
    log::warn("store.mark", "directory", directory_.string(), "error", forgotten.error());
  }
}

Result<void> PendingCopy::read_part_digests() {
  std::vector<Digest> digests(tiles_.partial.size());
  const auto read = guard_mapping_access(kResumeName.data(), [&] {
    for (std::size_t i = 0; i < digests.size(); ++i) {
      digests[i] = resume_->partial_digest(tiles_.partial[i]);
    }
  });
  if (!read) return fail(cut_resume_file());
  manifest_.part_digests.clear();
  for (std::size_t i = 0; i < digests.size(); ++i) {
    manifest_.part_digests.push_back({tiles_.partial[i], digests[i]});
  }
  return {};
}

Result<void> PendingCopy::check_complete() const {
  const auto found = resume_->marked();
  if (!found) return fail(cut_resume_file());
  const TileSet& marked = *found;
  TileIndex missing = 0;
  for (std::size_t i = 0; i < marked.words().size(); ++i) {
    missing +=
        static_cast<TileIndex>(__builtin_popcountll(tiles_.held.words()[i] & ~marked.words()[i]));
  }
  if (missing == 0) return {};
  if (!ResumeFile::matches(directory_ / kResumeName, identity())) return fail(cut_resume_file());
  return fail(ErrorCode::kInvalid, "{} cannot be committed: {} of {} tiles are not verified",
              manifest_.checkpoint->id.to_string(), missing, tiles_.held.count());
}

Result<void> PendingCopy::sync_segments() const {
  TRY_VOID(check_sizes());
  for (const auto& segment : segments_) {
    if (!is_memory_backed(segment->fd()) && ::fdatasync(segment->fd()) != 0) {
      return fail_errno(errno, fmt::format("sync {}", segment->path().string()));
    }
  }
  return {};
}

// Up to the rename of the manifest a failure leaves a pull that can be resumed.
Result<void> PendingCopy::put_in_place() {
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
Result<std::shared_ptr<const StoredVersion>> PendingCopy::commit() {
  TRY_VOID(check_complete());
  TRY_VOID(failpoint("store.commit.start"));
  TRY_VOID(sync_segments());
  close_for_writing();
  const Writers before = take_leases() ? writers() : Writers::kOthers;
  TRY_VOID(read_part_digests());
  if (before == Writers::kOthers) {
    distrust_all_parts();
    log::warn("store.commit", "directory", directory_.string(), "error",
              "another process has opened its files for writing", "action",
              "its tiles are read again before anybody uses them");
    // Without a digest they do not verify, so they are fetched again.
    manifest_.part_digests.clear();
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
void PendingCopy::record(Verification& verification) const {
  const auto now = verification.stamp();
  if (!now || writers() != Writers::kNone) return;
  for (std::size_t i = 0; i < leases_.size(); ++i) {
    if (leases_[i] != 0 && (*now)[i].lease != leases_[i]) return;
  }
  (void)verification.record(*now);
}

void PendingCopy::discard() {
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
