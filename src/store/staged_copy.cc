#include "src/store/staged_copy.h"

#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/store/files.h"
#include "src/store/store_directory.h"

namespace rekindle::store {

StagedCopy::StagedCopy(std::shared_ptr<StoreState> state, fs::path directory,
                       std::uint64_t reserved_bytes)
    : state_(std::move(state)), directory_(std::move(directory)), reserved_bytes_(reserved_bytes) {}

Result<std::unique_ptr<StagedCopy>> StagedCopy::create(std::shared_ptr<StoreState> state,
                                                       const ModelVersion& id,
                                                       std::uint64_t bytes) {
  std::uint8_t name[8];
  fill_random(name, sizeof name);
  const fs::path directory = state->directory() / kStagingName / to_hex(name, sizeof name);
  TRY_VOID(state->reserve(bytes, id));
  std::unique_ptr<StagedCopy> copy(new StagedCopy(std::move(state), directory, bytes));
  TRY_VOID(make_directory(directory));
  return copy;
}

StagedCopy::~StagedCopy() {
  state_->unreserve(reserved_bytes_);
  if (moved_) return;
  for (const auto& segment : segments_) {
    if (auto put = state_->pool().put(segment->path(), Deletion::kNow); !put) {
      log::warn("store.clean", "file", segment->path().string(), "error", put.error());
    }
  }
  std::error_code error;
  fs::remove_all(directory_, error);
  if (error) {
    log::warn("store.clean", "directory", directory_.string(), "error", error.message());
  }
}

// A linked file must not change under us: only files of our own that nobody else may write to.
// Their owner still can; docs/store.md says so.
bool StagedCopy::may_link(const SourceFile& source) const {
  struct stat staging {};
  return ::stat(directory_.c_str(), &staging) == 0 && staging.st_dev == source.opened.st_dev &&
         source.opened.st_uid == ::geteuid() && (source.opened.st_mode & 022) == 0;
}

Result<bool> StagedCopy::add_segment(const SegmentSpec& spec, const SourceFile* link_source) {
  const fs::path path = directory_ / spec.name;
  if (link_source != nullptr && may_link(*link_source)) {
    // By descriptor: the very file whose header was read.
    const std::string opened = fmt::format("/proc/self/fd/{}", link_source->fd.get());
    if (::linkat(AT_FDCWD, opened.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      TRY(std::shared_ptr<MappedSegment> segment, MappedSegment::open_read(path, spec.size_bytes));
      state_->pool().linked(segment);
      segments_.push_back(std::move(segment));
      TRY_VOID(failpoint("store.stage.after_link"));
      return false;
    }
    log::info("store.copy_instead_of_link", "file", link_source->path.string(), "error",
              errno_error(errno, "link"));
  }
  TRY(auto segment, state_->pool().create(path, spec.size_bytes, state_->room_bytes()));
  segments_.push_back(std::move(segment));
  TRY_VOID(failpoint("store.stage.after_create"));
  return true;
}

Result<void> StagedCopy::write_manifest(const Manifest& manifest) {
  for (const auto& segment : segments_) {
    if (!is_memory_backed(segment->fd()) && ::fdatasync(segment->fd()) != 0) {
      return fail_errno(errno, fmt::format("sync {}", segment->path().string()));
    }
    if (segment->size_ > 0) ::mprotect(segment->data_, segment->size_, PROT_READ);
  }
  TRY_VOID(failpoint("store.stage.before_manifest"));
  const std::string bytes = manifest.serialize();
  TRY_VOID(state_->pool().with_room(
      bytes.size(), [&] { return write_file_atomically(directory_ / kManifestName, bytes); }));
  TRY_VOID(sync_directory(directory_));
  return failpoint("store.stage.after_manifest");
}

Result<std::shared_ptr<const StoredVersion>> StagedCopy::put_in_place(const Manifest& manifest) {
  const Checkpoint& checkpoint = *manifest.checkpoint;
  const fs::path target =
      copy_directory(state_->directory(), checkpoint.id, manifest.layout.digest());
  TRY_VOID(state_->claim(target, checkpoint.id, checkpoint.root, 0));
  const auto move = [&]() -> Result<void> {
    std::error_code ignored;
    // A half-done pull or an unreadable copy of the same thing: this one replaces it.
    if (fs::exists(target, ignored)) {
      TRY_VOID(remove_copy(target, state_->pool(), Deletion::kLater));
    }
    TRY_VOID(make_directory(target.parent_path()));
    TRY_VOID(failpoint("store.commit_staged.before_rename"));
    return rename_file(directory_, target);
  };
  if (auto moved = move(); !moved) {
    state_->release(target, checkpoint.id, disk_bytes(target));
    return fail(std::move(moved).error());
  }
  moved_ = true;
  // Committed: what fails from here on is repaired by the next open.
  const auto finish = [&]() -> Result<void> {
    TRY_VOID(failpoint("store.commit_staged.after_rename"));
    TRY_VOID(sync_directory(target.parent_path()));
    return sync_directory(state_->directory() / kModelsName);
  };
  if (auto finished = finish(); !finished) {
    log::warn("store.commit", "directory", target.string(), "error", finished.error());
  }
  auto version = std::make_shared<StoredVersion>(StoredVersion{manifest, {}, target});
  for (auto& segment : segments_) {
    segment->path_ = target / segment->path_.filename();
    version->segments.push_back(std::move(segment));
  }
  segments_.clear();
  state_->commit(version);
  return version;
}

}  // namespace rekindle::store
