#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/memory_life.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "src/store/numa.h"
#include "src/store/read_lease.h"
#include "src/store/verification.h"
#include "src/tensor/checkpoint.h"

// The segment store: committed copies of checkpoints as safetensors files under one directory,
// usually on tmpfs. docs/internals/store.md describes the files and the state after a crash.
namespace rekindle::store {

// The most bytes of a segment in copies whose layout this host chooses.
inline constexpr std::uint64_t kMaxSegmentBytes = 5 * kGiB;

class FileMemory;

// One mapped segment file. The mapping is shared and stays valid after the file was unlinked. When
// the copy is gone and no MappedSegment of the file lives, the next copy is written into the file.
// So code that lends the file to another process (its descriptor, its path) keeps the shared_ptr as
// long as that process may have it mapped, or calls never_reuse().
class MappedSegment {
 public:
  static Result<std::unique_ptr<MappedSegment>> open_read(const std::filesystem::path& path,
                                                          std::uint64_t expected_bytes);
  // The pages that a file lacks when it is made.
  struct NewPages {
    // The NUMA node that will read them most; -1: unknown.
    int preferred_node = -1;
    // Of a file in memory: populate() comes later, if the kernel has what it needs (Linux 5.14).
    bool later = false;
    // Another process writes the file. Then pages that it has stay unmapped here, because readers
    // map many at a time.
    bool written_elsewhere = false;
  };
  // Creates (or reopens) the file. All its pages are allocated, unless that comes later: ENOSPC
  // comes here, not as SIGBUS later. On tmpfs `placement` chooses the place of new pages, by the
  // caller's preference. `memory`: where an earlier segment of the same file was mapped, of the
  // same size; null: nowhere.
  static Result<std::unique_ptr<MappedSegment>> create(
      const std::filesystem::path& path, std::uint64_t size_bytes, const NumaPlacement& placement,
      NewPages pages, std::shared_ptr<FileMemory> memory = nullptr);
  static Result<std::unique_ptr<MappedSegment>> create(const std::filesystem::path& path,
                                                       std::uint64_t size_bytes,
                                                       const NumaPlacement& placement = {}) {
    return create(path, size_bytes, placement, NewPages());
  }
  // Whether it still lacks pages. populate() allocates and maps them, until `stop`. False: not all
  // of them. Only their writers then learn why.
  bool lacks_pages() const { return lacks_pages_; }
  bool populate(const std::atomic<bool>& stop);
  ~MappedSegment();
  MappedSegment(const MappedSegment&) = delete;
  MappedSegment& operator=(const MappedSegment&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::span<std::byte> writable() { return {data_, size_}; }  // of create() only
  int fd() const { return fd_.get(); }
  const std::filesystem::path& path() const { return path_; }
  // The NUMA node that all of a segment of create() lies on, or will. -1: several nodes, unknown,
  // on a disk.
  int numa_node() const { return numa_node_; }
  // The life of the file's memory at this address. It goes on while the pool keeps the file, and
  // the next segment of the file has the same memory at the same address.
  std::shared_ptr<MemoryLife> life() const;
  // The file still has all its bytes (kCorrupt "truncated …" when not).
  Result<void> check_size() const;
  Result<FileStamp> stamp() const;

  // Gives up this process's own ways to write to the file. The descriptor keeps its number, the
  // mapping its address.
  Result<void> make_read_only();
  // The number of a read lease on the file. Takes a lease unless one is held. While the number
  // stays the same, no process has written to the file. 0: there is no lease, because this process
  // may write to the file itself, or because the kernel cannot tell whether others may
  // (ReadLease::take). kUnavailable: another process may.
  Result<std::uint64_t> lease();
  void end_lease();
  // A trusted process gets a writable descriptor and may keep it. From here on lease() returns 0
  // while another process may write to the file, also for later copies in the same file.
  void lend_for_writing() const { *lent_for_writing_ = true; }
  bool lent_for_writing() const { return *lent_for_writing_; }

 private:
  MappedSegment() = default;
  UniqueFd fd_;
  std::shared_ptr<FileMemory> memory_;
  std::byte* data_ = nullptr;  // of memory_
  std::size_t size_ = 0;
  std::filesystem::path path_;
  int numa_node_ = -1;
  bool lacks_pages_ = false;  // of create()
  std::mutex lease_mutex_;
  std::unique_ptr<ReadLease> lease_;  // of fd_; guarded by lease_mutex_
  // Of the file: SegmentPool hands it on to the next segment of the same file. Never null.
  std::shared_ptr<std::atomic<bool>> lent_for_writing_ = std::make_shared<std::atomic<bool>>(false);
  friend class PullCopy;  // renames the file and makes the mapping read-only at commit
  friend class PublishCopy;
  friend class SegmentPool;
};

// A committed copy, shared by all its readers. The store never changes it while a pointer to it or
// its segments is held. docs/internals/store.md says how writes of other processes are detected.
struct StoredVersion {
  StoredVersion(Manifest of, std::vector<std::shared_ptr<MappedSegment>> files,
                std::filesystem::path in, Evidence evidence);

  Manifest manifest;
  // As in the layout. Those of a pull are the same ones that PendingVersion::mapped() gave.
  std::vector<std::shared_ptr<MappedSegment>> segments;
  std::filesystem::path directory;
  // Whether its bytes may be used. A copy whose bytes this process has digested is verified at its
  // commit, unless another process may have written to its files. A copy that was found at open is
  // not verified.
  const std::shared_ptr<Verification> verification;

  // The bytes of one layout entry.
  std::span<const std::byte> array(const LayoutEntry& entry) const;
};

// A copy being filled. Thread-safe for distinct tiles.
class PendingVersion {
 public:
  // An uncommitted copy stays and can be resumed.
  virtual ~PendingVersion() = default;
  virtual const Manifest& manifest() const = 0;
  virtual std::span<std::byte> segment(std::uint32_t index) = 0;
  // The mapping behind it, for serving: the same object and address before and after the commit,
  // and valid as long as the pointer lives. Its path() changes at the commit.
  virtual std::shared_ptr<const MappedSegment> mapped(std::uint32_t index) const = 0;
  // Tiles that an earlier attempt has verified and that still verify. Empty on a first attempt.
  virtual const TileSet& verified() const = 0;
  // Keeps a proof of a part of a tile, so that the copy can prove its part later. Ignored where the
  // copy keeps none (kept_proofs()). Before mark_verified(). Any thread.
  virtual void keep_proof(TileIndex tile, const Box& box, std::string_view proof) = 0;
  // Marks a verified tile in the resume bitmap (a shared mapping: survives SIGKILL). Any thread.
  virtual void mark_verified(TileIndex tile) = 0;
  // kInternal: a file was truncated. The message says what to do.
  virtual Result<void> check_sizes() const = 0;
  // The reason of a failed access to segment() (SIGBUS, EFAULT), and what to do.
  virtual Error access_error() const = 0;
  virtual const std::filesystem::path& directory() const = 0;
};

struct StoreOptions {
  std::filesystem::path directory = "/dev/shm/rekindle";
  std::uint64_t budget_bytes = 0;  // 0: 90 % of the file system's size
  // The most bytes that the pool keeps of files whose copies are gone. nullopt: a quarter of the
  // budget. 0: nothing; needed by code that lends segments without keeping them (see
  // MappedSegment).
  std::optional<std::uint64_t> pool_bytes = 0;
  // Memory that the pool holds ready for the next copy, as far as the budget has room, and at least
  // as much as the largest copy that was here. top_up_reserve() allocates it. 0: none.
  std::uint64_t reserve_bytes = 0;
  // open() returns kInvalid for a node without memory.
  NumaPolicy numa;
  Evidence evidence = Evidence::kLeases;
  // Copies of other publishers are not listed. They stay as they are until their room is needed.
  PublisherTrust trust = {};
};

// A filled segment to which no process has been able to write since before its tiles were digested.
struct SealedSegment {
  // As MappedSegment::lease() has returned before that.
  std::uint64_t lease = 0;
  // Of tiles that lie whole in one of its entries: all, or those digested before a stop.
  std::map<TileIndex, Digest> leaves;
};

// Files of create_segment() that hold a checkpoint, or the part of it that `packed` describes.
struct FilledSegments {
  TensorSet tensors;
  // The layout of the files, and the headers that they must still have.
  PackedLayout packed;
  std::vector<std::shared_ptr<MappedSegment>> segments;
  // One for each segment, or empty. Null: not sealed.
  std::vector<std::shared_ptr<const SealedSegment>> sealed = {};

  const SealedSegment* seal_of(std::size_t segment) const {
    return segment < sealed.size() ? sealed[segment].get() : nullptr;
  }
};
// Digests a segment of `filled` whose writer is done, before the others are filled, at a lower
// priority, until `stop`. The other tiles are digested when it is staged, and all of them after
// kUnavailable: a process may still write to the segment, or nobody can tell.
Result<std::shared_ptr<const SealedSegment>> seal_segment(const FilledSegments& filled,
                                                          const TileMap& tiles,
                                                          std::uint32_t segment,
                                                          const std::atomic<bool>& stop);
// The most bytes of a segment of a publication of so many bytes. The agent digests one while the
// trainer writes the next.
std::uint64_t published_segment_bytes(std::uint64_t total_bytes);

// The arguments for begin() that continue a copy which lacks tiles and is off the list.
struct SetAside {
  std::shared_ptr<const Checkpoint> checkpoint;
  PackedLayout packed;
};

// Reported from worker threads, one call at a time.
struct PublishProgress {
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
};

// The root that a publication of these files would have. Reads every byte, and keeps none.
Result<Digest> root_of_files(const ModelVersion& id, std::span<const std::filesystem::path> paths,
                             const std::function<void(const PublishProgress&)>& progress);

// Thread-safe. Blocking calls: run them on a worker pool.
class SegmentStore {
 public:
  virtual ~SegmentStore() = default;
  // Locks the directory and adopts its copies. Every committed version is validated (manifest,
  // sizes and headers; for the digests see verify_version) and listed. Unfinished pulls stay for a
  // resume. Foreign files are refused or, inside a version's directory, skipped with a warning.
  static Result<std::unique_ptr<SegmentStore>> open(const StoreOptions& options);

  virtual std::vector<std::shared_ptr<const StoredVersion>> versions() const = 0;
  // Any layout of this version.
  virtual std::vector<std::shared_ptr<const StoredVersion>> find(const ModelVersion& id) const = 0;
  virtual std::shared_ptr<const StoredVersion> find(const ModelVersion& id,
                                                    const Digest& layout) const = 0;

  // Reserves budget, creates or re-opens the files of a pull. kExhausted: the message names the
  // missing bytes; nothing is retired. kDenied: the version is here with another root.
  // kUnavailable: this version and layout is here, or is being filled. `preferred_node`: the NUMA
  // node that reads the copy most. It counts for NumaPolicy::kAuto, and only for new memory.
  virtual Result<std::unique_ptr<PendingVersion>> begin(
      std::shared_ptr<const Checkpoint> checkpoint, PackedLayout layout, int preferred_node) = 0;
  // The same without such a node.
  Result<std::unique_ptr<PendingVersion>> begin(std::shared_ptr<const Checkpoint> checkpoint,
                                                PackedLayout layout) {
    return begin(std::move(checkpoint), std::move(layout), -1);
  }
  // The bytes that the budget lacks for such a begin(). 0: none; if begin() returned kExhausted,
  // the file system was full.
  virtual std::uint64_t missing_bytes(const ModelVersion& id, const Layout& layout) const = 0;
  // All tiles of the layout must be marked. Syncs (on disk file systems), renames, manifest last.
  // Every commit ends with discard_unfinished_before(), but another thread deletes the files. Calls
  // that lack their room wait for it. The next open deletes the files that are left at the end.
  virtual Result<std::shared_ptr<const StoredVersion>> commit(
      std::unique_ptr<PendingVersion> pending) = 0;
  // Gives up a pull that will not be resumed. Its files are deleted as at a commit.
  virtual void discard(std::unique_ptr<PendingVersion> pending) = 0;

  // Deletes the unfinished pulls of older versions of the model that no pull works on, because they
  // may never be resumed. Returns the freed bytes.
  virtual Result<std::uint64_t> discard_unfinished_before(const ModelVersion& id) = 0;

  // Publishing in two steps, so that the fleet can refuse the root before it becomes visible:
  // stage() copies the files (by reference where the file system can), digests them in the same
  // pass, in parallel, and commit_staged() renames the copy with its manifest into place. The
  // layout is that of the files. If a full copy with the same root is here, it is the result.
  // kDenied: the version is here with another root. kCorrupt: a source file has changed meanwhile.
  // A dropped Staged is discarded.
  class Staged;
  virtual Result<std::shared_ptr<Staged>> stage(
      const ModelVersion& id, std::span<const std::filesystem::path> paths,
      const std::function<void(const PublishProgress&)>& progress) = 0;
  // The same for segments that the caller has filled. A file that no process can write to is taken
  // over under another name. A file that a process still has open or mapped for writing is copied,
  // and never used again. kCorrupt: a header was changed, or a file was opened for writing
  // meanwhile, or since it was sealed.
  virtual Result<std::shared_ptr<Staged>> stage_segments(
      const ModelVersion& id, FilledSegments filled,
      const std::function<void(const PublishProgress&)>& progress) = 0;
  virtual const Manifest& staged_manifest(const Staged& staged) const = 0;
  // Adds signatures of its root to the copy, on disk too. Those that are not valid are left out.
  virtual Result<void> sign_staged(Staged& staged,
                                   std::span<const VersionSignature> signatures) = 0;
  virtual Result<std::shared_ptr<const StoredVersion>> commit_staged(
      std::shared_ptr<Staged> staged) = 0;
  virtual void discard_staged(std::shared_ptr<Staged> staged) = 0;

  // Publishing a part of a version (docs/internals/joint-publication.md), in two steps:
  // stage_part() takes the files over as stage_segments() does, so that from then on no process can
  // write to them, but digests nothing. staged_leaves() are those of sealed segments. finish_part()
  // makes the manifest when the leaves of all tiles are known. commit_staged() follows. A dropped
  // StagedPart is discarded.
  class StagedPart;
  virtual Result<std::shared_ptr<StagedPart>> stage_part(const ModelVersion& id,
                                                         FilledSegments filled) = 0;
  virtual const std::map<TileIndex, Digest>& staged_leaves(const StagedPart& part) const = 0;
  // The bytes of one entry of the part's layout. Read them within guard_mapping_access().
  virtual std::span<const std::byte> staged_array(const StagedPart& part,
                                                  const LayoutEntry& entry) const = 0;
  // `part_digests`, `part_layouts`: as in Manifest. kDenied: the version is here with another root.
  // kCorrupt: a file was opened for writing meanwhile.
  virtual Result<std::shared_ptr<Staged>> finish_part(std::shared_ptr<StagedPart> part,
                                                      std::shared_ptr<const Checkpoint> checkpoint,
                                                      std::vector<PartDigest> part_digests,
                                                      std::vector<Digest> part_layouts) = 0;

  // Unlinks or pools all layouts of a version. Their memory is freed or reused after the last
  // reader has ended. Returns the freed bytes.
  virtual Result<std::uint64_t> retire(const ModelVersion& id) = 0;
  // The same for one copy. kNotFound: it is no longer listed.
  virtual Result<std::uint64_t> retire_copy(const StoredVersion& copy) = 0;

  // Takes a copy off the list because the bytes of the tiles in `bad` are wrong. Its files become
  // those of a pull that lacks these tiles, and begin() continues it. kUnavailable: some process
  // may write to a file, or the file system cannot tell, so new bytes there might not stay.
  // kCorrupt: a file is truncated, gone or replaced. kNotFound: the copy is no longer listed.
  virtual Result<SetAside> set_aside(const StoredVersion& copy, std::span<const TileIndex> bad) = 0;
  // Whether files of such a copy, or of a pull, are there that no call works on.
  virtual bool is_left_over(const ModelVersion& id, const Digest& layout) const = 0;

  // A file for stage_segments(), on the store's file system, with all pages allocated and any
  // bytes. The budget does not count it.
  virtual Result<std::shared_ptr<MappedSegment>> create_segment(const std::filesystem::path& path,
                                                                std::uint64_t size_bytes) = 0;
  // Removes its name, if it still has it.
  virtual Result<void> remove_segment(const std::filesystem::path& path) = 0;
  // For a segment that was lent to a process which may keep it mapped: its file never goes to the
  // pool, or leaves it. Then the caller need not keep the pointer.
  virtual void never_reuse(const MappedSegment& segment) = 0;
  // Bytes in the pool, also of files that are still mapped.
  virtual std::uint64_t pooled_bytes() const = 0;
  // Allocates a file of up to kMaxSegmentBytes of what the pool lacks of the reserve, and calls
  // `prepare` with it before a copy can take it; copies that need its room wait meanwhile. Returns
  // the new bytes. Call it until that is 0, and again now and then.
  virtual Result<std::uint64_t> top_up_reserve(
      const std::function<void(MappedSegment&)>& prepare = nullptr) = 0;
  // Deletes files that calls before `now` - 10 minutes have seen in the pool, but leaves the
  // reserve.
  virtual void trim_pool(TimePoint now) = 0;

  // Without the pool, because its files make room for new ones.
  virtual std::uint64_t used_bytes() const = 0;
  virtual std::uint64_t budget_bytes() const = 0;
  virtual const std::filesystem::path& directory() const = 0;
};

// The checkpoint and the layout of the copy's files. kCorrupt: its headers cannot be read.
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
