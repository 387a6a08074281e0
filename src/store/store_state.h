#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/store/segment_pool.h"
#include "src/store/segment_store.h"
#include "src/store/write_watch.h"

namespace rekindle::store {

// The books of one open store, shared by the store and the copies on their way. Every method locks;
// none does I/O (the pool does). Each directory is committed, busy (a pull, a commit or a removal
// works on it) or left over. Its bytes count against the budget in each state.
class StoreState {
 public:
  StoreState(std::filesystem::path directory, UniqueFd lock, std::uint64_t budget_bytes,
             std::uint64_t pool_bytes, std::uint64_t reserve_bytes,
             std::unique_ptr<const NumaPlacement> placement, Evidence evidence);

  const std::filesystem::path& directory() const { return directory_; }
  Evidence evidence() const { return evidence_; }  // of every copy
  std::uint64_t budget_bytes() const { return budget_bytes_; }
  std::uint64_t used_bytes() const;  // without the pool
  // The segment files whose copies are gone. They have to fit into room_bytes().
  SegmentPool& pool() { return pool_; }
  std::uint64_t room_bytes() const;  // of the budget, the pool not counted
  // Of running pulls: the pages that they have not allocated yet.
  const std::shared_ptr<std::atomic<std::uint64_t>>& promised_bytes() const { return promised_; }
  // Over the files of copies on their way.
  WriteWatch& write_watch() { return write_watch_; }
  std::uint64_t next_generation();

  std::vector<std::shared_ptr<const StoredVersion>> versions() const;
  std::vector<std::shared_ptr<const StoredVersion>> find(const ModelVersion& id) const;
  std::shared_ptr<const StoredVersion> find(const ModelVersion& id, const Digest& layout) const;
  // kDenied when a copy or a pull of `id` has another root.
  Result<void> check_root(const ModelVersion& id, const Digest& root) const;

  // Makes a directory busy for a copy of `bytes`, which replaces the bytes left over there.
  // kUnavailable: busy already. kExhausted: beyond the budget. kDenied: another root.
  Result<void> claim(const std::filesystem::path& directory, const ModelVersion& id,
                     const Digest& root, std::uint64_t bytes);
  // The end of a claim: the copy is committed, or `left_bytes` of it stay (0: nothing does).
  void commit(std::shared_ptr<const StoredVersion> version);
  void release(const std::filesystem::path& directory, const ModelVersion& id,
               std::uint64_t left_bytes);

  // The bytes that the budget lacks for such a claim.
  std::uint64_t missing_bytes(const std::filesystem::path& directory, std::uint64_t bytes) const;

  // Counts bytes of a publish that has no directory of its own yet.
  Result<void> reserve(std::uint64_t bytes, const ModelVersion& id);
  void unreserve(std::uint64_t bytes);

  struct Retired {
    std::vector<std::pair<std::filesystem::path, ModelVersion>>
        directories;                                           // busy; release() each
    std::vector<std::shared_ptr<const StoredVersion>> copies;  // of those that were committed
    std::uint64_t bytes = 0;
  };
  // Takes all copies and leftovers of a version off the list. Running pulls stay.
  Retired retire(const ModelVersion& id);
  Retired retire_copy(const StoredVersion& version);
  // Takes a copy off the list. Its files stay, and its directory is busy until it is released.
  // False: it is not listed.
  bool take_off(const StoredVersion& version);
  // Lists the same copy with another manifest. False: it is not listed.
  bool replace(const StoredVersion& version, std::shared_ptr<const StoredVersion> with);
  bool is_left(const std::filesystem::path& directory) const;
  // The directories that are left over of older versions of the model.
  std::vector<std::filesystem::path> left_before(const ModelVersion& id) const;
  // Takes those of them that are still left over.
  Retired retire_left(const std::vector<std::filesystem::path>& directories);

 private:
  using Committed = std::map<std::filesystem::path, std::shared_ptr<const StoredVersion>>;
  struct Busy {
    ModelVersion id;
    Digest root;
    std::uint64_t bytes = 0;
  };
  struct Leftover {
    ModelVersion id;
    std::uint64_t bytes = 0;
  };
  using Leftovers = std::map<std::filesystem::path, Leftover>;
  struct Lingering {  // unlinked, but still mapped by a reader
    std::weak_ptr<const StoredVersion> version;
    std::uint64_t bytes = 0;
  };

  std::uint64_t used_locked() const;
  Committed::iterator retire_locked(Committed::iterator copy, Retired& retired);
  Leftovers::iterator retire_locked(Leftovers::iterator left, Retired& retired);
  Result<void> check_root_locked(const ModelVersion& id, const Digest& root) const;
  std::uint64_t missing_locked(std::uint64_t used, std::uint64_t bytes) const;
  Result<void> check_budget_locked(std::uint64_t bytes, const ModelVersion& id) const;

  const std::filesystem::path directory_;
  const UniqueFd lock_;
  const std::uint64_t budget_bytes_;
  const Evidence evidence_;
  const std::shared_ptr<std::atomic<std::uint64_t>> promised_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
  WriteWatch write_watch_;
  mutable std::mutex mutex_;  // guards all below
  Committed committed_;
  std::map<std::filesystem::path, Busy> busy_;
  Leftovers left_;
  std::vector<Lingering> lingering_;
  std::uint64_t reserved_ = 0;
  std::uint64_t generation_ = 0;
  SegmentPool pool_;  // deletes its files while the lock is held
};

// Fills the books from the disk: removes leftovers of publishes, finishes removals, adopts
// committed copies, counts half-done pulls. What cannot be read, or has no trusted signature where
// it needs one, is logged, counted and left alone.
Result<void> scan_store(StoreState& state, const PublisherTrust& trust);
// SegmentStore::set_aside().
Result<SetAside> set_aside(StoreState& state, const StoredVersion& copy,
                           std::span<const TileIndex> bad);

}  // namespace rekindle::store
