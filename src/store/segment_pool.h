#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/store/segment_store.h"

namespace rekindle::store {

// Segment files of copies that are gone, in DIR/pool: the next copy of the same layout takes them,
// with their pages, and with what other processes have mapped or pinned of them. Only files that
// this process has made come here: of the others nobody knows who has them mapped. A file is
// available once no MappedSegment of it lives. Thread-safe; I/O happens under the lock, so that
// whoever lacks room waits for those who make some.
class SegmentPool {
 public:
  // max_bytes 0: keeps nothing.
  SegmentPool(std::filesystem::path directory, std::uint64_t max_bytes);
  ~SegmentPool();  // deletes the files
  SegmentPool(const SegmentPool&) = delete;
  SegmentPool& operator=(const SegmentPool&) = delete;

  // The segment at `path`, writable: the file that is there, else an available one of exactly this
  // size, whose bytes are another version's, else a new one. For that, available files go, the
  // largest first, until no more than `keep_bytes` are left and the file system has room.
  Result<std::shared_ptr<MappedSegment>> create(const std::filesystem::path& path,
                                                std::uint64_t size_bytes, std::uint64_t keep_bytes);
  // Only the second of these; false when something is at `path`, or nothing fits.
  Result<bool> take(const std::filesystem::path& path, std::uint64_t size_bytes);
  // Another name of a file, mapped. It is ours when a segment that maps it lives (a number alone
  // may have been given to another file since): then the file is available when both are gone.
  void linked(const std::shared_ptr<const MappedSegment>& segment);
  // Takes away a segment's name. When it was the last one, and the file is ours, the pool has it.
  Result<void> put(const std::filesystem::path& path);

  // Somebody may have it mapped for good: it is deleted instead of pooled, also when it is here.
  void give_up(const MappedSegment& segment);

  // Does `work` again for as long as it lacks room and available files can go.
  template <typename Work>
  auto with_room(std::uint64_t bytes, const Work& work) {
    for (;;) {
      const std::uint64_t before = evictions();
      auto done = work();
      if (done || done.error().code() != ErrorCode::kExhausted || !make_room(bytes, before)) {
        return done;
      }
    }
  }

  void trim(TimePoint now);  // deletes what earlier calls have seen for kMaxAge
  std::uint64_t bytes() const;

  static constexpr std::chrono::minutes kMaxAge{10};

 private:
  using Inode = std::pair<std::uint64_t, std::uint64_t>;  // device, number
  using Mappings = std::vector<std::weak_ptr<const MappedSegment>>;
  struct File {
    std::filesystem::path path;
    std::uint64_t size_bytes = 0;
    Inode inode;
    std::optional<TimePoint> seen;
  };
  using Files = std::vector<File>;  // in the order of their coming

  std::uint64_t evictions() const;
  bool make_room(std::uint64_t bytes, std::uint64_t evictions_before);
  void keep_at_most(std::uint64_t available_bytes);
  void made(const std::shared_ptr<const MappedSegment>& segment);
  void reopened(const std::shared_ptr<const MappedSegment>& segment);
  Result<bool> move_in(const std::filesystem::path& path, const File& file);
  bool available(const File& file) const;
  bool unchanged(const File& file) const;
  std::uint64_t bytes_locked() const;
  Files::iterator largest_available();
  Files::iterator remove(Files::iterator file);

  const std::filesystem::path directory_;
  const std::uint64_t max_bytes_;
  mutable std::mutex mutex_;  // guards all below, and the files
  Files files_;
  // Files that this process has made, as long as they have a name that the store knows.
  std::map<Inode, Mappings> own_;
  std::uint64_t last_number_ = 0;
  std::uint64_t evictions_ = 0;
};

}  // namespace rekindle::store
