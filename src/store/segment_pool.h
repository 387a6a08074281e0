#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/worker_pool.h"
#include "src/store/file_memory.h"
#include "src/store/segment_store.h"

namespace rekindle::store {

// When files are deleted: freeing 100 GB takes many seconds (15 s for 4 KiB pages on tmpfs).
enum class Deletion {
  kNow,    // within the call
  kLater,  // on a thread of the pool; after a crash or its end the next open deletes the rest
};

// Segment files of copies that are gone, in DIR/pool. The next copy of the same layout takes them
// with their pages, also those that other processes have mapped or pinned. The pool keeps only
// files that this process has made, because it knows who has those mapped. A file is available once
// no MappedSegment of it lives. Thread-safe. Files are deleted outside of the lock; a call that
// lacks room waits for the deletions under way.
class SegmentPool {
 public:
  // max_bytes 0: keeps nothing. `reserve_bytes` of it are held ready for copies to come.
  SegmentPool(std::filesystem::path directory, std::uint64_t max_bytes, std::uint64_t reserve_bytes,
              std::unique_ptr<const NumaPlacement> placement);
  // Deletes the pooled files. Deletions of kLater that have not begun are left to the next open.
  ~SegmentPool();
  SegmentPool(const SegmentPool&) = delete;
  SegmentPool& operator=(const SegmentPool&) = delete;

  // The segment at `path`, writable: the file that is there, else an available one of this or a
  // similar size, with the bytes of another version, else a new one. For a new one, available files
  // are deleted, the largest first, until they and the deletions under way have at most
  // `keep_bytes`, and the file system has room.
  Result<std::shared_ptr<MappedSegment>> create(const std::filesystem::path& path,
                                                std::uint64_t size_bytes, std::uint64_t keep_bytes,
                                                MappedSegment::NewPages pages = {});
  // Only the second of these; false when something is at `path`, or nothing fits.
  Result<bool> take(const std::filesystem::path& path, std::uint64_t size_bytes,
                    int preferred_node);
  // Removes a segment's name. If it was the last name of a file that this process has made, the
  // pool keeps the file. Otherwise it is deleted, as are the files that it supersedes.
  Result<void> put(const std::filesystem::path& path, Deletion when);

  // Deletes later the files that an earlier process has left in the pool's directory, because
  // others may still map them. Called before any file is put there.
  Result<void> discard_leftovers();

  // A process may keep the file mapped, so it is deleted instead of pooled, also if it is here.
  void give_up(const MappedSegment& segment);

  // Repeats `work` as long as it lacks room and available files can be deleted.
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

  // Copies of `copy_bytes` are common here: the reserve shall suffice for one.
  void grow_reserve(std::uint64_t copy_bytes);
  // Adds one file to what is available, if the reserve lacks bytes and all of it has at most
  // `room_bytes`. Calls `prepare`, if any, before. Returns the new bytes; 0: nothing is missing.
  Result<std::uint64_t> top_up(std::uint64_t room_bytes,
                               const std::function<void(MappedSegment&)>& prepare);
  // Deletes files that earlier calls have seen for kMaxAge, but leaves the reserve. Ends the life
  // of the memory of files that are neither here nor in a copy, because they may be gone.
  void trim(TimePoint now);
  std::uint64_t bytes() const;

  static constexpr std::chrono::minutes kMaxAge{10};

 private:
  using Inode = std::pair<std::uint64_t, std::uint64_t>;  // device, number
  using Mappings = std::vector<std::weak_ptr<const MappedSegment>>;
  struct Own {
    Mappings mappings;
    std::shared_ptr<std::atomic<bool>> lent_for_writing;  // of every MappedSegment of the file
    std::shared_ptr<FileMemory> memory;                   // of the newest of these
    int numa_node = -1;                                   // MappedSegment::numa_node()
  };
  struct File {
    std::filesystem::path path;
    std::uint64_t size_bytes = 0;
    Inode inode;
    int numa_node = -1;
    std::optional<TimePoint> seen;
  };
  using Files = std::vector<File>;  // in the order of their coming
  // Files that are off the books, to be deleted once the lock is not held.
  class Doomed {
   public:
    explicit Doomed(SegmentPool& pool, Deletion when = Deletion::kNow) : pool_(pool), when_(when) {}
    ~Doomed();  // as unlink()
    Doomed(const Doomed&) = delete;
    Doomed& operator=(const Doomed&) = delete;
    Deletion when() const { return when_; }
    void add(std::filesystem::path path, std::uint64_t bytes);  // under the lock
    Result<void> unlink();  // outside of it, now or later; the first error of now

   private:
    SegmentPool& pool_;
    const Deletion when_;
    std::vector<std::pair<std::filesystem::path, std::uint64_t>> files_;
  };

  std::uint64_t deleted() const;
  bool make_room(std::uint64_t bytes, std::uint64_t deleted_before);
  void await_room(std::uint64_t wanted, std::uint64_t expected) const;
  void keep_at_most(std::uint64_t bytes);
  Result<void> unlink(const std::filesystem::path& path, std::uint64_t bytes);
  void unlink_later(const std::filesystem::path& path, std::uint64_t bytes);
  // Of a file that no living MappedSegment maps. Null: this process has not mapped it before.
  std::shared_ptr<FileMemory> free_memory_of(const std::filesystem::path& path) const;
  void made(const std::shared_ptr<MappedSegment>& segment);
  void reopened(const std::shared_ptr<MappedSegment>& segment);
  Result<bool> move_in(const std::filesystem::path& path, const File& file);
  Result<void> keep(const std::filesystem::path& path, Doomed& doomed, Doomed& in_place);
  bool available(const File& file) const;
  bool unchanged(const File& file) const;
  Result<void> add_file(const std::filesystem::path& path, std::uint64_t size_bytes,
                        int preferred_node, const std::function<void(MappedSegment&)>& prepare);
  Files::iterator best_fit(std::uint64_t size_bytes, int numa_node);
  std::uint64_t available_locked() const;
  std::uint64_t max_bytes() const { return std::max(max_bytes_, reserve_bytes_.load()); }
  std::uint64_t bytes_locked() const;
  Files::iterator largest_available();
  Files::iterator remove(Files::iterator file, Doomed& doomed);

  const std::filesystem::path directory_;
  const std::uint64_t max_bytes_;
  std::atomic<std::uint64_t> reserve_bytes_;
  const std::unique_ptr<const NumaPlacement> placement_;
  mutable std::mutex mutex_;         // guards all below, and the names of the files
  std::condition_variable changed_;  // deletions, and files of the reserve
  Files files_;
  // Files that this process has made, as long as they have a name that the store knows.
  std::map<Inode, Own> own_;
  std::uint64_t last_number_ = 0;
  std::size_t deleting_ = 0;  // files, under way
  std::uint64_t deleting_bytes_ = 0;
  std::uint64_t making_bytes_ = 0;  // of the file that top_up() makes
  std::uint64_t deleted_ = 0;       // files, in all
  std::atomic<bool> stopping_ = false;
  std::unique_ptr<WorkerPool> deleter_;  // of one thread, which the first file for it starts
};

}  // namespace rekindle::store
