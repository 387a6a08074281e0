#include "src/store/later_pages.h"

#include <algorithm>
#include <utility>

#include <sys/stat.h>
#include <sys/statvfs.h>

#include "src/base/log.h"
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

// Nothing reserves the room. If others take it meanwhile, the write that lacks it fails.
Result<std::unique_ptr<LaterPages>> LaterPages::begin(
    std::vector<std::shared_ptr<MappedSegment>> segments) {
  std::uint64_t missing = 0;
  for (const auto& segment : segments) missing += missing_bytes(*segment);
  struct statvfs status {};
  if (missing > 0 && ::fstatvfs(segments.front()->fd(), &status) == 0) {
    const std::uint64_t available = std::uint64_t{status.f_bavail} * status.f_frsize;
    if (missing > available) {
      return fail(ErrorCode::kExhausted,
                  "the files in {} need {} bytes ({}), their file system has {} available ({}): "
                  "retire versions or enlarge it",
                  segments.front()->path().parent_path().string(), missing, format_bytes(missing),
                  available, format_bytes(available));
    }
  }
  return std::unique_ptr<LaterPages>(new LaterPages(std::move(segments)));
}

LaterPages::LaterPages(std::vector<std::shared_ptr<MappedSegment>> segments)
    : segments_(std::move(segments)) {
  if (segments_.empty()) return;
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

LaterPages::~LaterPages() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void LaterPages::run() {
  set_thread_name("rk-allocate");
  for (const auto& segment : segments_) {
    if (stop_) return;
    if (auto allocated = segment->allocate(stop_); !allocated) {
      log::warn("store.allocate", "file", segment->path().string(), "error", allocated.error());
      return;
    }
  }
}

}  // namespace rekindle::store
