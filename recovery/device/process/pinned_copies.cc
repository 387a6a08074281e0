#include "recovery/device/process/pinned_copies.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>

#include <fmt/format.h>

namespace rekindle::device {

namespace {

constexpr std::chrono::milliseconds kLingerLook{200};
constexpr std::chrono::minutes kLongestLinger{10};
constexpr std::chrono::milliseconds kPinLook{20};

// The name by which the file was opened, wherever the file was moved since. A file that was linked
// into the store has other names, which do not count.
bool has_its_name(const UniqueFd& file) {
  std::error_code error;
  const std::string path =
      std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", file.get()), error).string();
  return !error && !path.ends_with(" (deleted)");
}

}  // namespace

Result<Segment> SegmentCache::get(int fd, std::uint64_t bytes) {
  struct stat file {};
  if (::fstat(fd, &file) != 0) return fail_errno(errno, "look at a segment");
  const bool writable = (::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
  std::erase_if(entries_, [](const auto& item) { return item.second.segment.expired(); });
  const Key key{file.st_dev, file.st_ino};
  if (const auto found = entries_.find(key); found != entries_.end()) {
    auto segment = found->second.segment.lock();
    if (segment != nullptr && segment->bytes() == bytes && found->second.writable >= writable) {
      return segment;
    }
  }
  TRY(auto segment, pinner_.add(fd, bytes));
  entries_[key] = {segment, writable};
  return segment;
}

void SegmentCache::forget(int fd) {
  struct stat file {};
  if (::fstat(fd, &file) == 0) entries_.erase(Key{file.st_dev, file.st_ino});
}

std::uint64_t SegmentCache::mapped_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [key, entry] : entries_) {
    if (const auto segment = entry.segment.lock()) bytes += segment->bytes();
  }
  return bytes;
}

void Lingering::add(std::vector<Segment> segments, std::vector<UniqueFd> files, TimePoint now) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    all_.push_back({std::move(segments[i]), std::move(files[i]), now + kLongestLinger});
  }
}

std::optional<TimePoint> Lingering::look(TimePoint now) {
  std::vector<Segment> over;
  std::erase_if(all_, [&](One& one) {
    const bool stays = one.segment.use_count() == 1 && now < one.until && has_its_name(one.file);
    if (!stays) over.push_back(std::move(one.segment));
    return !stays;
  });
  if (!over.empty()) let_go_(std::move(over));
  if (all_.empty()) return std::nullopt;
  return now + kLingerLook;
}

PinnedCopies::PinnedCopies(bucket::Device* first, unsigned threads) {
  if (first == nullptr) return;
  pinner_ = std::make_unique<bucket::Pinner>(*first, threads);
  cache_ = std::make_unique<SegmentCache>(*pinner_);
}

Result<std::vector<Segment>> PinnedCopies::map(const std::vector<UniqueFd>& files,
                                               const std::vector<std::uint64_t>& bytes) {
  if (files.size() != bytes.size()) {
    return fail(ErrorCode::kInvalid, "{} files for {} segments", files.size(), bytes.size());
  }
  if (cache_ == nullptr) return fail(ErrorCode::kNotFound, "there is no device here");
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < files.size(); ++i) {
    TRY(auto segment, cache_->get(files[i].get(), bytes[i]));
    segments.push_back(std::move(segment));
  }
  return segments;
}

Result<void> PinnedCopies::hold(std::uint64_t copy, std::vector<UniqueFd> files,
                                const std::vector<std::uint64_t>& bytes, TimePoint now) {
  TRY(auto segments, map(files, bytes));
  copies_[copy] = {std::move(segments), std::move(files), now, false};
  return {};
}

void PinnedCopies::drop(std::uint64_t copy, Pages pages, TimePoint now) {
  auto node = copies_.extract(copy);
  if (node.empty()) return;
  if (pages == Pages::kGone) {
    for (const UniqueFd& file : node.mapped().files) cache_->forget(file.get());
    return unpin(std::move(node.mapped().segments));
  }
  lingering_.add(std::move(node.mapped().segments), std::move(node.mapped().files), now);
}

// Unpinning and unmapping a copy takes seconds, so another thread does it.
void PinnedCopies::unpin(std::vector<Segment> segments) {
  const auto doomed = std::make_shared<std::vector<Segment>>(std::move(segments));
  unpinner_.submit([doomed] { doomed->clear(); });
}

std::vector<PinnedCopies::Settled> PinnedCopies::take_settled(TimePoint now) {
  std::vector<Settled> all;
  for (auto& [number, copy] : copies_) {
    if (copy.settled) continue;
    copy.settled = std::ranges::all_of(copy.segments, [this](const Segment& segment) {
      return pinner_->settled(*segment, 0, segment->bytes());
    });
    if (!copy.settled) continue;
    Settled settled{number, now - copy.began, {}};
    for (const Segment& segment : copy.segments) {
      if (const auto failure = pinner_->failure(*segment)) settled.problem = failure->message();
    }
    all.push_back(std::move(settled));
  }
  return all;
}

std::uint64_t PinnedCopies::pinned_bytes() const {
  return pinner_ != nullptr ? pinner_->pinned_bytes() : 0;
}

std::optional<TimePoint> PinnedCopies::look(TimePoint now) {
  auto next = lingering_.look(now);
  const bool pins = std::ranges::any_of(copies_, [](const auto& c) { return !c.second.settled; });
  if (pins) next = std::min(next.value_or(now + kPinLook), now + kPinLook);
  return next;
}

}  // namespace rekindle::device
