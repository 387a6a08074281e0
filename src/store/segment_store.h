#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/store/numa.h"
#include "src/store/read_lease.h"
#include "src/store/verification.h"
#include "src/tensor/checkpoint.h"

// The segment store: committed copies of checkpoints as safetensors files under one directory,
// usually on tmpfs. What lies where, and what a crash leaves: docs/internals/store.md.
namespace rekindle::store {

// One mapped segment file. The mapping is shared and stays valid after the file was unlinked.
// Whoever lends the file to another process (its descriptor, its path) keeps the shared_ptr for as
// long as that process may have it mapped, or says never_reuse(): when the copy is gone and no
// MappedSegment of the file lives, the next copy is written into it.
class MappedSegment {
 public:
  static Result<std::unique_ptr<MappedSegment>> open_read(const std::filesystem::path& path,
                                                          std::uint64_t expected_bytes);
  // Creates (or reopens) the file with all its pages allocated: ENOSPC comes here, not as SIGBUS
  // later. On tmpfs those that are not there yet come where `placement` says.
  static Result<std::unique_ptr<MappedSegment>> create(const std::filesystem::path& path,
                                                       std::uint64_t size_bytes,
                                                       const NumaPlacement& placement = {});
  ~MappedSegment();
  MappedSegment(const MappedSegment&) = delete;
  MappedSegment& operator=(const MappedSegment&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::span<std::byte> writable() { return {data_, size_}; }  // of create() only
  int fd() const { return fd_.get(); }
  const std::filesystem::path& path() const { return path_; }
  // The file still has all its bytes (kCorrupt "truncated …" when not).
  Result<void> check_size() const;
  Result<FileStamp> stamp() const;

  // This process lets go of its own ways to write to the file. The descriptor keeps its number, the
  // mapping its address.
  Result<void> make_read_only();
  // The number of a read lease on the file, which is taken unless one is held. While the number
  // stays, nobody can have written to the file. 0: none can be had, because this process may write
  // to the file itself, or nobody can tell whether others may (ReadLease::take). kUnavailable: some
  // other process may.
  Result<std::uint64_t> lease();
  void end_lease();
  // A trusted process gets a writable descriptor and may keep it: from here on lease() is 0 where
  // somebody may write to the file. That holds for later copies in the same file, too.
  void lend_for_writing() const { *lent_for_writing_ = true; }
  bool lent_for_writing() const { return *lent_for_writing_; }

 private:
  MappedSegment() = default;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::filesystem::path path_;
  std::mutex lease_mutex_;
  std::unique_ptr<ReadLease> lease_;  // of fd_; guarded by lease_mutex_
  // Of the file: SegmentPool hands it on to the next segment of the same file. Never null.
  std::shared_ptr<std::atomic<bool>> lent_for_writing_ = std::make_shared<std::atomic<bool>>(false);
  friend class PendingCopy;  // renames the file and makes the mapping read-only at commit
  friend class StagedCopy;
  friend class SegmentPool;
};

// A committed copy, shared by everyone who reads it. The store never changes it while a pointer to
// it or its segments is held; who else can, and how that is found out: docs/internals/store.md.
struct StoredVersion {
  StoredVersion(Manifest of, std::vector<std::shared_ptr<MappedSegment>> files,
                std::filesystem::path in, Evidence evidence);

  Manifest manifest;
  // As in the layout. Those of a pull are the same ones that PendingVersion::mapped() gave.
  std::vector<std::shared_ptr<MappedSegment>> segments;
  std::filesystem::path directory;
  // Whether its bytes may be used. A copy whose bytes this process has digested is verified at its
  // commit, unless somebody else may have written to its files; one that it found at open is not.
  const std::shared_ptr<Verification> verification;

  // The bytes of one layout entry.
  std::span<const std::byte> array(const LayoutEntry& entry) const;
};

// A copy being filled. Thread-safe for distinct tiles.
class PendingVersion {
 public:
  virtual ~PendingVersion() = default;  // what was not committed stays, to be resumed
  virtual const Manifest& manifest() const = 0;
  virtual std::span<std::byte> segment(std::uint32_t index) = 0;
  // The mapping behind it, for whoever serves it: the same object and address before and after the
  // commit, and valid for as long as the pointer lives. Its path() changes when it is committed.
  virtual std::shared_ptr<const MappedSegment> mapped(std::uint32_t index) const = 0;
  // Tiles that a previous life has verified and that still verify; empty on a first try.
  virtual const TileSet& verified() const = 0;
  // Marks a verified tile in the resume bitmap (a shared mapping: survives SIGKILL). Any thread.
  virtual void mark_verified(TileIndex tile) = 0;
  // The files still have all their bytes; kInternal, what to do, when somebody cut one short.
  virtual Result<void> check_sizes() const = 0;
  // After an access to segment() failed (SIGBUS, EFAULT): why, and what to do.
  virtual Error access_error() const = 0;
  virtual const std::filesystem::path& directory() const = 0;
};

struct StoreOptions {
  std::filesystem::path directory = "/dev/shm/rekindle";
  std::uint64_t budget_bytes = 0;  // 0: 90 % of the file system's size
  // The most that the pool keeps of files whose copies are gone; nullopt: a quarter of the budget;
  // 0: nothing, for whoever lends segments without keeping them (see MappedSegment).
  std::optional<std::uint64_t> pool_bytes = 0;
  NumaPolicy numa;  // kInvalid by open(): a node without memory
  Evidence evidence = Evidence::kLeases;
};

// Files of create_segment() that hold a whole checkpoint.
struct FilledSegments {
  TensorSet tensors;
  PackedLayout packed;  // what the files hold; their headers must still be these
  std::vector<std::shared_ptr<MappedSegment>> segments;
};

// A copy that lacks tiles and is off the list: what begin() needs to go on with it.
struct SetAside {
  std::shared_ptr<const Checkpoint> checkpoint;
  PackedLayout packed;
};

// Reported from worker threads, one call at a time.
struct PublishProgress {
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
};

// Thread-safe. Blocking calls: run them on a worker pool.
class SegmentStore {
 public:
  virtual ~SegmentStore() = default;
  // Locks and re-adopts: every committed version is validated (manifest, sizes, headers; not the
  // digests: see verify_version) and listed; what is half-done stays for a resume; what is not ours
  // is refused or, inside a version's directory, skipped with a warning.
  static Result<std::unique_ptr<SegmentStore>> open(const StoreOptions& options);

  virtual std::vector<std::shared_ptr<const StoredVersion>> versions() const = 0;
  // Any layout of this version.
  virtual std::vector<std::shared_ptr<const StoredVersion>> find(const ModelVersion& id) const = 0;
  virtual std::shared_ptr<const StoredVersion> find(const ModelVersion& id,
                                                    const Digest& layout) const = 0;

  // Reserves budget, creates or re-opens the files of a pull. kExhausted names the bytes missing
  // and retires nothing; kDenied when the version is here with another root. One PendingVersion per
  // (version, layout) at a time (kUnavailable).
  virtual Result<std::unique_ptr<PendingVersion>> begin(
      std::shared_ptr<const Checkpoint> checkpoint, PackedLayout layout) = 0;
  // What the budget lacks for such a begin(); 0: nothing, a kExhausted was the file system's.
  virtual std::uint64_t missing_bytes(const ModelVersion& id, const Layout& layout) const = 0;
  // All tiles of the layout must be marked. Syncs (on disk file systems), renames, manifest last.
  // As every commit, it ends with discard_unfinished_before(), but the files are deleted on another
  // thread: who lacks their room waits, and what is left when the store is closed the next open
  // deletes.
  virtual Result<std::shared_ptr<const StoredVersion>> commit(
      std::unique_ptr<PendingVersion> pending) = 0;
  // Gives up a pull that will not be resumed; its files are deleted as a commit does.
  virtual void discard(std::unique_ptr<PendingVersion> pending) = 0;

  // Deletes what pulls of older versions of the model have left over, unless one goes on there:
  // nobody may ever come back for it. Returns bytes freed.
  virtual Result<std::uint64_t> discard_unfinished_before(const ModelVersion& id) = 0;

  // Publishing in two steps, so that the fleet can refuse the root before it becomes visible:
  // stage() copies the files (by reference where the file system can; digesting in the same pass,
  // in parallel) and commit_staged() renames the copy with its manifest into place. The layout is
  // that of the files. kDenied when the version is here with another root; when a full copy with
  // the same root is here, that one is the result. kCorrupt when a source file changes meanwhile. A
  // Staged that is dropped is discarded.
  class Staged;
  virtual Result<std::shared_ptr<Staged>> stage(
      const ModelVersion& id, std::span<const std::filesystem::path> paths,
      const std::function<void(const PublishProgress&)>& progress) = 0;
  // The same for segments that somebody has filled. A file that no process can write to any more is
  // taken over as it is, under another name; one that somebody still has open or mapped for writing
  // is copied first, and never used again. kCorrupt: a header is not the one that belongs there, or
  // somebody opened a file for writing meanwhile.
  virtual Result<std::shared_ptr<Staged>> stage_segments(
      const ModelVersion& id, FilledSegments filled,
      const std::function<void(const PublishProgress&)>& progress) = 0;
  virtual const Manifest& staged_manifest(const Staged& staged) const = 0;
  virtual Result<std::shared_ptr<const StoredVersion>> commit_staged(
      std::shared_ptr<Staged> staged) = 0;
  virtual void discard_staged(std::shared_ptr<Staged> staged) = 0;

  // Unlinks or pools all layouts of a version; memory goes, or is used again, when the last reader
  // lets go. Returns bytes freed.
  virtual Result<std::uint64_t> retire(const ModelVersion& id) = 0;
  // The same of one copy. kNotFound: it is not listed any more.
  virtual Result<std::uint64_t> retire_copy(const StoredVersion& copy) = 0;

  // Takes a copy off the list because the bytes of the tiles in `bad` are wrong. Its files stay as
  // those of a pull that lacks these tiles, and begin() goes on there. kUnavailable: some process
  // may write to a file (or the file system cannot tell), so nothing that is put there need stay.
  // kCorrupt: a file is truncated, gone or replaced. kNotFound: it is not listed any more.
  virtual Result<SetAside> set_aside(const StoredVersion& copy, std::span<const TileIndex> bad) = 0;
  // Files of such a copy, or of a pull, are there and nobody works on them.
  virtual bool is_left_over(const ModelVersion& id, const Digest& layout) const = 0;

  // A file for stage_segments(), on the store's file system, all pages there; the bytes in it are
  // anything. The budget does not count it.
  virtual Result<std::shared_ptr<MappedSegment>> create_segment(const std::filesystem::path& path,
                                                                std::uint64_t size_bytes) = 0;
  // Takes its name away again, if it still has it.
  virtual Result<void> remove_segment(const std::filesystem::path& path) = 0;
  // For a segment that was lent to a process which may have it mapped for good: its file is not
  // pooled, or not any more. The pointer need not be kept then.
  virtual void never_reuse(const MappedSegment& segment) = 0;
  // What the pool keeps, also of files that are still mapped.
  virtual std::uint64_t pooled_bytes() const = 0;
  // Deletes what the pool has had for ten minutes, as the times of these calls tell.
  virtual void trim_pool(TimePoint now) = 0;

  // Without the pool: that never keeps anything from being created.
  virtual std::uint64_t used_bytes() const = 0;
  virtual std::uint64_t budget_bytes() const = 0;
  virtual const std::filesystem::path& directory() const = 0;
};

// What a copy in the same files would be made of. kCorrupt: its headers cannot be read.
Result<SetAside> describe_copy(const StoredVersion& copy);

// Digests every tile of the copy again. kCorrupt names the first bad tensor, tile and file offset,
// and how many tiles are bad. Survives files that are truncated while it reads.
Result<void> verify_version(const StoredVersion& version, std::size_t threads,
                            const std::function<void(const PublishProgress&)>& progress);

// One tile: kCorrupt names tensor, tile and offset in the file, or the file that was truncated.
// kInternal: its bytes cannot be read.
Result<void> verify_stored_tile(const StoredVersion& version, TileIndex tile);
// The headers of its files are those that the layout describes.
Result<void> check_headers(const StoredVersion& version);

// `rekindle verify PATH`: a version's directory or its manifest, without a store around it.
Result<StoredVersion> open_version(const std::filesystem::path& path);

}  // namespace rekindle::store
