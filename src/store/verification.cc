#include "src/store/verification.h"

#include <cerrno>
#include <utility>

#include "src/store/segment_store.h"

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

}  // namespace rekindle::store
