#include "src/store/verification.h"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>
#include <utility>

#include "src/base/worker_pool.h"
#include "src/store/fault_guard.h"
#include "src/store/segment_store.h"
#include "src/tensor/held_tile.h"

namespace rekindle::store {

FileStamp FileStamp::of(const struct stat& status) {
  return {std::uint64_t{status.st_dev}, std::uint64_t{status.st_ino},
          static_cast<std::uint64_t>(status.st_size),
          std::int64_t{status.st_ctim.tv_sec} * 1'000'000'000 + status.st_ctim.tv_nsec, 0};
}

Verification::Verification(const Digest& root, std::vector<std::shared_ptr<MappedSegment>> segments,
                           Evidence evidence)
    : root_(root), segments_(std::move(segments)), evidence_(evidence) {}

// The mapping is that of the open file; the next process to open the copy goes by its name. Both
// must be the same file.
Result<Verification::Stamps> Verification::stamp() const {
  Stamps stamps;
  stamps.reserve(segments_.size());
  for (const auto& segment : segments_) {
    TRY_VOID(segment->check_size());
    std::uint64_t lease = 0;
    if (evidence_ == Evidence::kLeases) {
      TRY(lease, segment->lease());
    }
    TRY(FileStamp open, segment->stamp());
    open.lease = lease;
    struct stat named {};
    if (::lstat(segment->path().c_str(), &named) != 0) {
      if (errno == ENOENT) {
        return fail(ErrorCode::kCorrupt, "segment {} was removed", segment->path().string());
      }
      return fail_errno(errno, fmt::format("stat segment {}", segment->path().string()));
    }
    // Size and ctime may change between the two calls: that is no other file.
    const FileStamp by_name = FileStamp::of(named);
    if (by_name.device != open.device || by_name.inode != open.inode) {
      return fail(ErrorCode::kCorrupt, "segment {} was replaced by another file",
                  segment->path().string());
    }
    stamps.push_back(open);
  }
  return stamps;
}

bool Verification::record(const Stamps& before) {
  const auto now = stamp();
  if (!now || *now != before) return false;
  const std::lock_guard lock(mutex_);
  if (state_ == CopyState::kQuarantined) return false;
  state_ = CopyState::kVerified;
  record_ = Record{std::chrono::system_clock::now(), SteadyClock().now(), root_, before};
  return true;
}

void Verification::confirm() {
  const std::lock_guard lock(mutex_);
  if (state_ != CopyState::kVerified) return;
  record_->when = std::chrono::system_clock::now();
  record_->read = SteadyClock().now();
}

void Verification::doubt() {
  const std::lock_guard lock(mutex_);
  if (state_ != CopyState::kVerified) return;
  state_ = CopyState::kUnverified;
  record_.reset();
}

void Verification::quarantine(std::string reason) {
  const std::lock_guard lock(mutex_);
  state_ = CopyState::kQuarantined;
  record_.reset();
  reason_ = std::move(reason);
}

CopyState Verification::state() {
  const auto now = stamp();
  const std::lock_guard lock(mutex_);
  if (state_ == CopyState::kVerified && (!now || *now != record_->files)) {
    state_ = CopyState::kUnverified;
    record_.reset();
  }
  return state_;
}

std::optional<Verification::Record> Verification::record() const {
  const std::lock_guard lock(mutex_);
  return record_;
}

std::string Verification::why_quarantined() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

namespace {

constexpr std::size_t kTilesPerJob = 8;

// Bad tiles of many threads; keeps the error of the first in the order of the checkpoint.
class BadTiles {
 public:
  void add(TileIndex tile, Error error) {
    const std::lock_guard lock(mutex_);
    ++count_;
    if (first_ && first_->first <= tile) return;
    first_.emplace(tile, std::move(error));
  }
  Result<void> result(std::size_t all) {
    if (!first_) return {};
    return fail(ErrorCode::kCorrupt, "{} ({} of {} tiles are bad)", first_->second.message(),
                count_, all);
  }

 private:
  std::mutex mutex_;
  std::size_t count_ = 0;                             // guarded by mutex_
  std::optional<std::pair<TileIndex, Error>> first_;  // guarded by mutex_
};

// The reason of a fault in a mapping.
Error why_unreadable(const StoredVersion& version) {
  for (const auto& segment : version.segments) {
    if (auto whole = segment->check_size(); !whole) return std::move(whole).error();
  }
  return {ErrorCode::kInternal,
          fmt::format("a file in {} cannot be read: its memory or its disk fails, see dmesg",
                      version.directory.string())};
}

}  // namespace

Result<void> verify_stored_tile(const StoredVersion& version, TileIndex tile) {
  const ArrayOf array_of = [&](const LayoutEntry& entry) { return version.array(entry); };
  Result<void> verified;
  const auto read = guard_mapping_access(
      "segment", [&] { verified = verify_tile(version.manifest, tile, array_of); });
  if (!read) return fail(why_unreadable(version));
  return verified;
}

Result<void> verify_version(const StoredVersion& version, std::size_t threads,
                            const std::function<void(const PublishProgress&)>& progress) {
  const Manifest& manifest = version.manifest;
  const auto fail_here = [&](Error error) {
    return fail(std::move(error).with_context(manifest.checkpoint->id.to_string()));
  };
  for (const auto& segment : version.segments) {
    if (auto whole = segment->check_size(); !whole) return fail_here(std::move(whole).error());
  }
  if (auto headers = check_headers(version); !headers) {
    return fail_here(std::move(headers).error());
  }
  const std::vector<TileIndex> tiles =
      tiles_of_layout(*manifest.checkpoint, manifest.layout).held.tiles();
  BadTiles bad;
  std::mutex progress_mutex;
  PublishProgress done{0, manifest.layout.payload_bytes()};
  std::size_t tiles_done = 0;
  const std::size_t jobs = (tiles.size() + kTilesPerJob - 1) / kTilesPerJob;
  WorkerPool pool("rk-verify", std::max<std::size_t>(1, threads), 64);
  pool.parallel_for(jobs, [&](std::size_t job) {
    const std::size_t begin = job * kTilesPerJob;
    const std::size_t end = std::min(tiles.size(), begin + kTilesPerJob);
    for (std::size_t i = begin; i < end; ++i) {
      if (auto verified = verify_stored_tile(version, tiles[i]); !verified) {
        bad.add(tiles[i], std::move(verified).error());
      }
    }
    if (!progress) return;
    const std::lock_guard lock(progress_mutex);
    tiles_done += end - begin;
    done.bytes_done = tiles_done == tiles.size() ? done.bytes_total
                                                 : done.bytes_total / tiles.size() * tiles_done;
    progress(done);
  });
  if (auto result = bad.result(tiles.size()); !result) {
    return fail_here(std::move(result).error());
  }
  return {};
}

}  // namespace rekindle::store
