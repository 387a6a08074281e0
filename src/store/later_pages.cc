#include "src/store/later_pages.h"

#include <algorithm>
#include <utility>

#include <sys/stat.h>
#include <sys/statvfs.h>

#include "src/base/units.h"
#include "src/base/worker_pool.h"

namespace rekindle::store {

namespace {

std::uint64_t missing_bytes(const MappedSegment& segment) {
  struct stat status {};
  if (::fstat(segment.fd(), &status) != 0) return 0;
  const std::uint64_t there = static_cast<std::uint64_t>(status.st_blocks) * 512;
  return segment.bytes().size() - std::min<std::uint64_t>(there, segment.bytes().size());
}

}  // namespace

// Nothing reserves the room against other programs. If they take it meanwhile, the write that lacks
// it fails.
Result<std::unique_ptr<LaterPages>> LaterPages::begin(
    std::vector<std::shared_ptr<MappedSegment>> segments,
    std::shared_ptr<std::atomic<std::uint64_t>> promised) {
  std::erase_if(segments, [](const auto& segment) { return !segment->lacks_pages(); });
  std::uint64_t bytes = 0;
  for (const auto& segment : segments) bytes += missing_bytes(*segment);
  struct statvfs status {};
  // A tmpfs without a limit has no blocks.
  const bool limited =
      bytes > 0 && ::fstatvfs(segments.front()->fd(), &status) == 0 && status.f_blocks > 0;
  const std::uint64_t available = std::uint64_t{status.f_bavail} * status.f_frsize;
  const std::uint64_t others = promised->load();
  if (limited && bytes > available - std::min(available, others)) {
    return fail(ErrorCode::kExhausted,
                "the files in {} need {} bytes ({}), their file system has {} available ({}), of "
                "which other pulls take {}: retire versions or enlarge it",
                segments.front()->path().parent_path().string(), bytes, format_bytes(bytes),
                available, format_bytes(available), format_bytes(others));
  }
  return std::unique_ptr<LaterPages>(
      new LaterPages(std::move(segments), bytes, std::move(promised)));
}

LaterPages::LaterPages(std::vector<std::shared_ptr<MappedSegment>> segments, std::uint64_t bytes,
                       std::shared_ptr<std::atomic<std::uint64_t>> promised)
    : segments_(std::move(segments)), bytes_(bytes), promised_(std::move(promised)) {
  promised_->fetch_add(bytes_);
  const SignalsBlocked blocked;
  if (!segments_.empty()) thread_ = std::thread([this] { run(); });
}

LaterPages::~LaterPages() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  promised_->fetch_sub(bytes_);
}

void LaterPages::run() {
  set_thread_name("rk-allocate");
  for (const auto& segment : segments_) {
    if (!segment->populate(stop_)) return;
  }
}

}  // namespace rekindle::store
