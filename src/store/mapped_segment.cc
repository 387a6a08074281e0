#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "src/base/log.h"
#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "src/store/file_memory.h"
#include "src/store/files.h"
#include "src/store/segment_store.h"

namespace rekindle::store {

namespace {

Failure fail_segment(int error_number, std::string_view what, const fs::path& path) {
  return fail_errno(error_number, fmt::format("{} segment {}", what, path.string()));
}

Result<std::uint64_t> size_of(int fd, const fs::path& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return fail_segment(errno, "stat", path);
  if (!S_ISREG(status.st_mode)) {
    return fail(ErrorCode::kInvalid, "segment {} is not a regular file", path.string());
  }
  return static_cast<std::uint64_t>(status.st_size);
}

Failure no_space(int fd, const fs::path& path, std::uint64_t size_bytes) {
  struct statvfs status {};
  ::fstatvfs(fd, &status);
  const std::uint64_t available = std::uint64_t{status.f_bavail} * status.f_frsize;
  return fail(ErrorCode::kExhausted,
              "segment {} needs {} bytes ({}), its file system has {} available ({}): retire "
              "versions or enlarge it",
              path.string(), size_bytes, format_bytes(size_bytes), available,
              format_bytes(available));
}

// Calls `work` for pieces of the mapping on several threads. A piece begins at a multiple of
// `piece_bytes`.
void for_pieces(std::span<std::byte> mapping, std::uint64_t piece_bytes,
                const std::function<void(std::span<std::byte>)>& work) {
  const std::uint64_t pieces = (mapping.size() + piece_bytes - 1) / piece_bytes;
  const auto run = [&](std::size_t i) {
    const std::uint64_t begin = i * piece_bytes;
    work(mapping.subspan(begin, std::min(piece_bytes, mapping.size() - begin)));
  };
  if (pieces <= 1) {
    if (pieces == 1) run(0);
    return;
  }
  WorkerPool pool("rk-memory", std::min<std::size_t>(store_threads(), pieces), 64);
  pool.parallel_for(pieces, run);
}

// Allocates the pages that the file lacks and maps all of them: the kernel zeroes fresh ones, which
// one thread does at a quarter of the memory's speed, and no later write has to fault them in. Only
// a fault, not fallocate, heeds the mapping's wish for huge pages. False: not all of them are
// there, or the kernel cannot do it (Linux before 5.14).
bool populate_pages(std::span<std::byte> mapping, const std::atomic<bool>& stop) {
  constexpr std::uint64_t kPieceBytes = 64 * kMiB;
  std::atomic<bool> whole = true;
  for_pieces(mapping, kPieceBytes, [&](std::span<std::byte> piece) {
    while (whole && !stop && ::madvise(piece.data(), piece.size(), MADV_POPULATE_WRITE) != 0) {
      if (errno != EINTR && errno != EAGAIN) whole = false;
    }
  });
  return whole;
}

// Allocates every page, in pieces, because tmpfs starts over when a signal interrupts it.
Result<void> allocate(int fd, const fs::path& path, std::uint64_t size_bytes) {
  constexpr std::uint64_t kPieceBytes = 256 * kMiB;
  for (std::uint64_t offset = 0; offset < size_bytes;) {
    const std::uint64_t piece = std::min(kPieceBytes, size_bytes - offset);
    int error = 0;
    if (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(piece)) != 0) {
      error = errno;
    }
    if (error == EINTR) continue;
    if (error == EOPNOTSUPP || error == ENOSYS) {
      error = ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(piece));
    }
    if (error == ENOSPC || error == EDQUOT || error == ENOMEM || error == EFBIG) {
      return no_space(fd, path, size_bytes);
    }
    if (error != 0) return fail_segment(error, "allocate", path);
    offset += piece;
  }
  return {};
}

// Allocating pages that are there takes time: tmpfs looks at each of them. On other file systems
// the count of blocks includes more than the data.
bool is_allocated(int fd, std::uint64_t size_bytes) {
  struct stat status {};
  return is_memory_backed(fd) && ::fstat(fd, &status) == 0 &&
         static_cast<std::uint64_t>(status.st_blocks) * 512 >= size_bytes;
}

// Maps the file at `at`; null: anywhere.
Result<std::byte*> map(int fd, const fs::path& path, std::uint64_t size_bytes, int protection,
                       std::byte* at = nullptr) {
  if (size_bytes == 0) return nullptr;
  void* const data =
      ::mmap(at, size_bytes, protection, MAP_SHARED | (at != nullptr ? MAP_FIXED : 0), fd, 0);
  if (data == MAP_FAILED) return fail_segment(errno, "map", path);
  // Advice only: without it the copy is slower, and a core dump larger.
  ::madvise(data, size_bytes, MADV_DONTDUMP);
  ::madvise(data, size_bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

}  // namespace

FileMemory::~FileMemory() {
  life_.reset();
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
}

void FileMemory::vacate() {
  if (data_ == nullptr) return;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(data_, size_bytes_, PROT_NONE, kFlags, -1, 0) == MAP_FAILED) {
    log::warn("store.unmap", "bytes", size_bytes_, "error", std::strerror(errno), "effect",
              "this process keeps the file mapped until the pool deletes it");
    return;
  }
  occupied_ = false;
}

Result<std::unique_ptr<MappedSegment>> MappedSegment::open_read(const fs::path& path,
                                                                std::uint64_t expected_bytes) {
  std::unique_ptr<MappedSegment> segment(new MappedSegment);
  segment->path_ = path;
  segment->fd_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!segment->fd_) return fail_segment(errno, "open", path);
  TRY(const std::uint64_t actual, size_of(segment->fd_.get(), path));
  if (actual != expected_bytes) {
    return fail(ErrorCode::kCorrupt, "segment {} has {} bytes instead of {}: {}", path.string(),
                actual, expected_bytes, actual < expected_bytes ? "truncated" : "changed");
  }
  TRY(segment->data_, map(segment->fd_.get(), path, expected_bytes, PROT_READ));
  segment->size_ = expected_bytes;
  segment->memory_ = std::make_shared<FileMemory>(segment->data_, segment->size_);
  return segment;
}

Result<std::unique_ptr<MappedSegment>> MappedSegment::create(const fs::path& path,
                                                             std::uint64_t size_bytes,
                                                             const NumaPlacement& placement,
                                                             NewPages pages,
                                                             std::shared_ptr<FileMemory> memory) {
  std::unique_ptr<MappedSegment> segment(new MappedSegment);
  segment->path_ = path;
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  const bool is_new = fd >= 0;
  if (!is_new && errno == EEXIST) fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return fail_segment(errno, "create", path);
  segment->fd_ = UniqueFd(fd);

  const auto size_file = [&]() -> Result<void> {
    TRY(const std::uint64_t actual, size_of(fd, path));
    if (actual != size_bytes && ::ftruncate(fd, static_cast<off_t>(size_bytes)) != 0) {
      return errno == EFBIG ? Result<void>(no_space(fd, path, size_bytes))
                            : Result<void>(fail_segment(errno, "size", path));
    }
    const bool same = memory != nullptr && actual == size_bytes &&
                      memory->size_bytes() == size_bytes && memory->occupy();
    std::byte* const at = same ? memory->data() : nullptr;
    TRY(segment->data_, map(fd, path, size_bytes, PROT_READ | PROT_WRITE, at));
    segment->size_ = size_bytes;
    segment->memory_ =
        same ? std::move(memory) : std::make_shared<FileMemory>(segment->data_, size_bytes);
    const bool in_memory = is_memory_backed(fd);
    // Before the allocation, which places the pages.
    const bool placed = in_memory && !is_allocated(fd, size_bytes) &&
                        placement.apply(segment->writable(), pages.preferred_node);
    const auto whole = segment->writable();
    segment->lacks_pages_ =
        in_memory && pages.later &&
        populate_pages(whole.first(std::min<std::size_t>(whole.size(), 1)), false);
    if (segment->lacks_pages_) {
      // A file that had pages before may have them anywhere.
      if (placed && is_new) segment->numa_node_ = placement.node_for(pages.preferred_node);
      return {};
    }
    const bool maps = in_memory && !(pages.written_elsewhere && is_allocated(fd, size_bytes));
    const bool populated = maps && populate_pages(whole, false);
    if (!populated && !is_allocated(fd, size_bytes)) TRY_VOID(allocate(fd, path, size_bytes));
    if (in_memory) segment->numa_node_ = node_of_memory(segment->bytes());
    return {};
  };
  if (auto sized = size_file(); !sized) {
    if (is_new) ::unlink(path.c_str());  // gives back what was allocated
    return fail(std::move(sized).error());
  }
  return segment;
}

bool MappedSegment::populate(const std::atomic<bool>& stop) {
  return populate_pages(writable(), stop);
}

MappedSegment::~MappedSegment() {
  end_lease();
  if (memory_ != nullptr) memory_->vacate();
}

std::shared_ptr<MemoryLife> MappedSegment::life() const { return {memory_, &memory_->life()}; }

Result<void> MappedSegment::check_size() const {
  TRY(const std::uint64_t actual, size_of(fd_.get(), path_));
  if (actual < size_) {
    return fail(ErrorCode::kCorrupt, "segment {} was truncated from {} to {} bytes", path_.string(),
                size_, actual);
  }
  return {};
}

Result<FileStamp> MappedSegment::stamp() const {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) return fail_segment(errno, "stat", path_);
  return FileStamp::of(status);
}

Result<void> MappedSegment::make_read_only() {
  if ((::fcntl(fd_.get(), F_GETFL) & O_ACCMODE) == O_RDONLY) return {};
  // By descriptor, because the file's name may have changed.
  const std::string opened = fmt::format("/proc/self/fd/{}", fd_.get());
  const UniqueFd reader(::open(opened.c_str(), O_RDONLY | O_CLOEXEC));
  if (!reader) return fail_segment(errno, "open for reading", path_);
  if (size_ > 0) {
    // The kernel would take the pages out of the mapping one by one, on one thread. After each
    // piece it interrupts all CPUs that run this process, so the pieces are large.
    constexpr std::uint64_t kPieceBytes = 512 * kMiB;
    for_pieces(writable(), kPieceBytes, [](std::span<std::byte> piece) {
      (void)::madvise(piece.data(), piece.size(), MADV_DONTNEED);
    });
    void* const data = ::mmap(data_, size_, PROT_READ, MAP_SHARED | MAP_FIXED, reader.get(), 0);
    if (data == MAP_FAILED) return fail_segment(errno, "map for reading", path_);
    ::madvise(data, size_, MADV_DONTDUMP);
    ::madvise(data, size_, MADV_HUGEPAGE);
  }
  if (::dup3(reader.get(), fd_.get(), O_CLOEXEC) < 0) {
    return fail_segment(errno, "close for writing", path_);
  }
  return {};
}

Result<std::uint64_t> MappedSegment::lease() {
  const std::lock_guard lock(lease_mutex_);
  if (lease_ != nullptr && lease_->held()) return lease_->number();
  lease_.reset();
  if ((::fcntl(fd_.get(), F_GETFL) & O_ACCMODE) != O_RDONLY) return 0;
  auto taken = ReadLease::take(fd_.get());
  if (taken) {
    lease_ = std::move(*taken);
    return lease_->number();
  }
  if (taken.error().code() != ErrorCode::kUnavailable || lent_for_writing()) return 0;
  return fail(ErrorCode::kUnavailable,
              "segment {} is open or mapped for writing in another process: nothing is believed of "
              "it until that process lets go (`fuser -v` names it)",
              path_.string());
}

void MappedSegment::end_lease() {
  const std::lock_guard lock(lease_mutex_);
  lease_.reset();
}

StoredVersion::StoredVersion(Manifest of, std::vector<std::shared_ptr<MappedSegment>> files,
                             std::filesystem::path in, Evidence evidence)
    : manifest(std::move(of)),
      segments(std::move(files)),
      directory(std::move(in)),
      verification(std::make_shared<Verification>(manifest.checkpoint->root, segments, evidence)) {}

std::span<const std::byte> StoredVersion::array(const LayoutEntry& entry) const {
  const TensorInfo& tensor = manifest.checkpoint->tensors[entry.tensor];
  return segments[entry.segment]->bytes().subspan(
      entry.offset_bytes, entry.box.elements() * dtype_size_bytes(tensor.dtype));
}

}  // namespace rekindle::store
