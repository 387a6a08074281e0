#include "recovery/device/segment_cache.h"

#include <cerrno>

#include <fcntl.h>
#include <sys/stat.h>

namespace rekindle::device {

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

std::uint64_t SegmentCache::mapped_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [key, entry] : entries_) {
    if (const auto segment = entry.segment.lock()) bytes += segment->bytes();
  }
  return bytes;
}

}  // namespace rekindle::device
