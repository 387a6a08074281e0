#pragma once

#include <condition_variable>
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
// available once no MappedSegment of it lives. Thread-safe. Files are deleted outside of the lock
// (to free 100 GB takes seconds); whoever lacks room waits for those who make some.
class SegmentPool {
 public:
  // max_bytes 0: keeps nothing.
  SegmentPool(std::filesystem::path directory, std::uint64_t max_bytes,
              std::unique_ptr<const NumaPlacement> placement);
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
      const std::uint64_t before = deleted();
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
  // Files that are off the books, to be deleted once the lock is not held.
  class Doomed {
   public:
    explicit Doomed(SegmentPool& pool) : pool_(pool) {}
    ~Doomed();  // deletes
    Doomed(const Doomed&) = delete;
    Doomed& operator=(const Doomed&) = delete;
    void add(std::filesystem::path path);  // under the lock
    Result<void> unlink();                 // outside of it; the first error

   private:
    SegmentPool& pool_;
    std::vector<std::filesystem::path> paths_;
  };

  std::uint64_t deleted() const;
  bool make_room(std::uint64_t bytes, std::uint64_t deleted_before);
  void keep_at_most(std::uint64_t available_bytes);
  void made(const std::shared_ptr<const MappedSegment>& segment);
  void reopened(const std::shared_ptr<const MappedSegment>& segment);
  Result<bool> move_in(const std::filesystem::path& path, const File& file);
  Result<bool> keep(const std::filesystem::path& path, Doomed& doomed);
  bool available(const File& file) const;
  bool unchanged(const File& file) const;
  std::uint64_t bytes_locked() const;
  Files::iterator largest_available();
  Files::iterator remove(Files::iterator file, Doomed& doomed);

  const std::filesystem::path directory_;
  const std::uint64_t max_bytes_;
  const std::unique_ptr<const NumaPlacement> placement_;
  mutable std::mutex mutex_;  // guards all below, and the names of the files
  std::condition_variable deletions_;
  Files files_;
  // Files that this process has made, as long as they have a name that the store knows.
  std::map<Inode, Mappings> own_;
  std::uint64_t last_number_ = 0;
  std::size_t deleting_ = 0;   // files, under way
  std::uint64_t deleted_ = 0;  // in all
};

}  // namespace rekindle::store
