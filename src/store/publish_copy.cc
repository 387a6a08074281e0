#include "src/store/publish_copy.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/store/files.h"
#include "src/store/store_directory.h"

namespace rekindle::store {

PublishCopy::PublishCopy(std::shared_ptr<StoreState> state, fs::path directory,
                         std::uint64_t reserved_bytes)
    : state_(std::move(state)), directory_(std::move(directory)), reserved_bytes_(reserved_bytes) {}

Result<std::unique_ptr<PublishCopy>> PublishCopy::create(std::shared_ptr<StoreState> state,
                                                         const ModelVersion& id,
                                                         std::uint64_t bytes) {
  std::uint8_t name[8];
  fill_random(name, sizeof name);
  const fs::path directory = state->directory() / kStagingName / to_hex(name, sizeof name);
  TRY_VOID(state->reserve(bytes, id));
  std::unique_ptr<PublishCopy> copy(new PublishCopy(std::move(state), directory, bytes));
  TRY_VOID(make_directory(directory));
  return copy;
}

PublishCopy::~PublishCopy() {
  state_->unreserve(reserved_bytes_);
  if (moved_) return;
  // A file that another process may write to is never used again.
  const bool given_up = !check_unwritten() || std::ranges::any_of(segments_, [](const auto& one) {
    return !one->lease();
  });
  for (const auto& segment : segments_) {
    segment->end_lease();
    if (given_up) state_->pool().give_up(*segment);
  }
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

Result<void> PublishCopy::add_segment(const SegmentSpec& spec) {
  TRY(auto segment,
      state_->pool().create(directory_ / spec.name, spec.size_bytes, state_->room_bytes()));
  auto watched = state_->write_watch().add(segment->fd(), segment->path());
  add_made(std::move(segment), std::move(watched));
  return failpoint("store.stage.after_create");
}

void PublishCopy::add_made(std::shared_ptr<MappedSegment> segment,
                           std::unique_ptr<WatchedFile> watched) {
  watched_.push_back(std::move(watched));
  made_.push_back(segment);
  segments_.push_back(std::move(segment));
}

Result<bool> PublishCopy::add_clone(const SegmentSpec& spec, const SourceFile& source) {
  const fs::path path = directory_ / spec.name;
  UniqueFd clone(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!clone) return fail_errno(errno, fmt::format("create {}", path.string()));
  if (::ioctl(clone.get(), FICLONE, source.fd.get()) != 0) {
    TRY_VOID(unlink_if_present(path));
    return false;
  }
  auto watched = state_->write_watch().add(clone.get(), path);
  watched->close_own(std::move(clone));
  auto segment = MappedSegment::open_read(path, spec.size_bytes);
  if (!segment) {  // the source was truncated or grew before it was cloned
    TRY_VOID(unlink_if_present(path));
    return fail(std::move(segment).error());
  }
  add_made(std::move(*segment), std::move(watched));
  return true;
}

namespace {

Failure opened_for_writing(const MappedSegment& segment) {
  return fail(ErrorCode::kCorrupt,
              "segment {} was opened for writing while it was published: publish it again when "
              "its writer is done",
              segment.path().filename().string());
}

}  // namespace

// First this process gives up its own ways to write, then the kernel says whether there are others.
// From then on, a process that opens the file for writing breaks the lease, and waits meanwhile.
Result<bool> PublishCopy::take_over(const SegmentSpec& spec,
                                    const std::shared_ptr<MappedSegment>& filled,
                                    const SealedSegment* sealed) {
  TRY_VOID(filled->make_read_only());
  const auto lease = filled->lease();
  if (sealed != nullptr && (!lease || *lease != sealed->lease)) {
    state_->pool().give_up(*filled);
    return opened_for_writing(*filled);
  }
  if (!lease || *lease == 0) {
    log::info("store.copy_instead_of_take_over", "file", filled->path().string(), "why",
              lease ? "nobody can tell whether another process may write to it"
                    : lease.error().message());
    state_->pool().give_up(*filled);
    return false;
  }
  leased_.push_back({filled, *lease});
  const fs::path path = directory_ / spec.name;
  TRY_VOID(rename_file(filled->path(), path));
  filled->path_ = path;
  segments_.push_back(filled);
  TRY_VOID(failpoint("store.stage.after_take_over"));
  return true;
}

// A file of the pool may have been lent for writing: the device process closes it at any time.
Result<void> PublishCopy::check_unwritten() const {
  for (const auto& [segment, before] : leased_) {
    const auto lease = segment->lease();
    if (!lease || *lease != before) return opened_for_writing(*segment);
  }
  const auto seen = state_->write_watch().seen(watched_);
  for (std::size_t i = 0; i < made_.size(); ++i) {
    const bool closed = seen[i].closed && !made_[i]->lent_for_writing();
    if (seen[i].written || closed) return opened_for_writing(*made_[i]);
  }
  return {};
}

bool PublishCopy::is_watched() const {
  const auto seen = state_->write_watch().seen(watched_);
  return std::ranges::all_of(seen, &WriteWatch::Seen::watched);
}

// As take_over(): first this process, then the kernel says whether there are others.
Result<void> PublishCopy::close_for_writing() {
  for (std::size_t i = 0; i < made_.size(); ++i) {
    MappedSegment& segment = *made_[i];
    if (auto given_up = make_read_only(segment, *watched_[i]); !given_up) {
      log::warn("store.stage", "file", segment.path().string(), "error", given_up.error(), "action",
                "this process keeps it open for writing");
    }
    const auto lease = segment.lease();
    if (!lease) return opened_for_writing(segment);
    if (*lease != 0) leased_.push_back({made_[i], *lease});
  }
  return check_unwritten();
}

Result<void> PublishCopy::write_manifest(const Manifest& manifest) {
  for (const auto& segment : segments_) {
    if (!is_memory_backed(segment->fd()) && ::fdatasync(segment->fd()) != 0) {
      return fail_errno(errno, fmt::format("sync {}", segment->path().string()));
    }
  }
  TRY_VOID(close_for_writing());
  TRY_VOID(failpoint("store.stage.before_manifest"));
  TRY_VOID(store_manifest(*state_, directory_, manifest));
  return failpoint("store.stage.after_manifest");
}

Result<void> store_manifest(StoreState& state, const fs::path& directory,
                            const Manifest& manifest) {
  const std::string bytes = manifest.serialize();
  TRY_VOID(state.pool().with_room(
      bytes.size(), [&] { return write_file_atomically(directory / kManifestName, bytes); }));
  return sync_directory(directory);
}

Result<void> sign_staged(StoreState& state, SegmentStore::Staged& staged,
                         std::span<const VersionSignature> signatures) {
  Manifest manifest = staged.manifest;
  manifest.checkpoint = with_signatures(manifest.checkpoint, signatures);
  if (manifest.checkpoint == staged.manifest.checkpoint) return {};
  if (staged.existing == nullptr) {
    TRY_VOID(staged.copy->replace_manifest(manifest));
  } else {
    auto with = std::make_shared<StoredVersion>(*staged.existing);
    with->manifest = manifest;
    if (!state.replace(*staged.existing, with)) {
      return fail(ErrorCode::kStale, "{} has just left the store; publish it again",
                  manifest.checkpoint->id.to_string());
    }
    TRY_VOID(store_manifest(state, with->directory, manifest));
    staged.existing = std::move(with);
  }
  staged.manifest = std::move(manifest);
  return {};
}

Result<std::shared_ptr<const StoredVersion>> PublishCopy::put_in_place(const Manifest& manifest) {
  const Checkpoint& checkpoint = *manifest.checkpoint;
  const fs::path target =
      copy_directory(state_->directory(), checkpoint.id, manifest.layout.digest());
  TRY_VOID(check_unwritten());
  TRY_VOID(state_->claim(target, checkpoint.id, checkpoint.root, 0));
  const auto move = [&]() -> Result<void> {
    std::error_code ignored;
    // This copy replaces an unfinished pull or an unreadable copy of the same version and layout.
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
  // Committed: the next open repairs failures from here on.
  const auto finish = [&]() -> Result<void> {
    TRY_VOID(failpoint("store.commit_staged.after_rename"));
    TRY_VOID(sync_directory(target.parent_path()));
    return sync_directory(state_->directory() / kModelsName);
  };
  if (auto finished = finish(); !finished) {
    log::warn("store.commit", "directory", target.string(), "error", finished.error());
  }
  for (const auto& segment : segments_) segment->path_ = target / segment->path_.filename();
  auto version =
      std::make_shared<StoredVersion>(manifest, std::move(segments_), target, state_->evidence());
  segments_.clear();
  // No other process could write since before the digests, so the recorded bytes are the digested
  // ones.
  if (const auto now = version->verification->stamp(); now && check_unwritten() && is_watched()) {
    (void)version->verification->record(*now);
  }
  state_->commit(version);
  return version;
}

}  // namespace rekindle::store
