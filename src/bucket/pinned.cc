#include "src/bucket/pinned.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace rekindle::bucket {

// Pieces are settled one by one. The pinner's mutex guards all members below `pinner`.
struct Pinner::Segment final : PinnedSegment {
  Segment(Pinner& owner, void* mapping, std::uint64_t size, bool may_write) : pinner(owner) {
    data_ = static_cast<const std::byte*>(mapping);
    if (may_write) writable_ = static_cast<std::byte*>(mapping);
    bytes_ = size;
    const std::size_t count = (size + kPieceBytes - 1) / kPieceBytes;
    pins.resize(count);
    settled.resize(count);
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() override {
    std::uint64_t pinned = 0;
    for (std::size_t i = 0; i < pins.size(); ++i) {
      if (pins[i] != nullptr) pinned += piece(i).size();
    }
    pins.clear();
    ::munmap(const_cast<std::byte*>(data_), bytes_);
    const std::lock_guard lock(pinner.mutex_);
    pinner.pinned_bytes_ -= pinned;
  }
  std::span<const std::byte> piece(std::size_t index) const {
    const std::uint64_t begin = index * kPieceBytes;
    return {data_ + begin, std::min(kPieceBytes, bytes_ - begin)};
  }

  Pinner& pinner;
  // Null: not yet, or the piece could not be pinned.
  std::vector<std::unique_ptr<Pin>> pins;
  std::vector<bool> settled;
  // Of the first piece that could not be pinned.
  std::optional<Error> failure;
};

Pinner::Pinner(Device& device, unsigned threads) : device_(device) {
  // As many threads as can be started. Without any, nothing is pinned and copies are slower.
  try {
    for (unsigned i = 0; i < std::max(threads, 1u); ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error& error) {
    if (threads_.empty()) {
      no_thread_ = Error(ErrorCode::kExhausted, fmt::format("start a thread: {}", error.what()));
    }
  }
}

Pinner::~Pinner() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Result<std::shared_ptr<const PinnedSegment>> Pinner::add(int fd, std::uint64_t bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return fail_errno(errno, "look at a segment");
  if (static_cast<std::uint64_t>(status.st_size) < bytes || bytes == 0) {
    return fail(ErrorCode::kInternal, "a segment of {} bytes is a file of {}", bytes,
                status.st_size);
  }
  // A broadcast keeps passing buckets in writable segments; the others are pinned for reading.
  const bool writable = (::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
  void* const mapping =
      ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) return fail_errno(errno, "map a segment");
  const auto segment = std::make_shared<Segment>(*this, mapping, bytes, writable);
  {
    const std::lock_guard lock(mutex_);
    segment->failure = no_thread_;
    for (std::size_t i = 0; i < segment->settled.size(); ++i) {
      if (threads_.empty()) {
        segment->settled[i] = true;
      } else {
        jobs_.push_back({segment, i});
      }
    }
  }
  work_.notify_all();
  return segment;
}

void Pinner::run() {
  ::pthread_setname_np(::pthread_self(), "rk-pin");
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    auto segment = job.segment.lock();
    if (segment != nullptr) {
      // Page tables first: these threads fill them in parallel, while a device's driver does not.
      const auto piece = segment->piece(job.piece);
      // By reading: a write fault would change the times of the file, as a write does. On tmpfs the
      // entries of a writable mapping become writable anyway.
      (void)::madvise(const_cast<std::byte*>(piece.data()), piece.size(), MADV_POPULATE_READ);
      auto pin = device_.pin(piece);
      const std::lock_guard held(mutex_);
      if (pin) {
        segment->pins[job.piece] = std::move(*pin);
        pinned_bytes_ += segment->piece(job.piece).size();
      } else if (!segment->failure) {
        segment->failure = std::move(pin).error();
      }
      segment->settled[job.piece] = true;
      settled_.notify_all();
    }
    // This may be the last reference, whose destructor takes the lock.
    segment.reset();
    lock.lock();
  }
}

bool Pinner::settled(const PinnedSegment& segment, std::uint64_t from, std::uint64_t bytes) const {
  const auto& mine = static_cast<const Segment&>(segment);
  if (bytes == 0) return true;
  const std::lock_guard lock(mutex_);
  for (std::uint64_t i = from / kPieceBytes; i <= (from + bytes - 1) / kPieceBytes; ++i) {
    if (!mine.settled[i]) return false;
  }
  return true;
}

bool Pinner::pinned(const PinnedSegment& segment, std::uint64_t from, std::uint64_t bytes) const {
  const auto& mine = static_cast<const Segment&>(segment);
  if (bytes == 0) return true;
  const std::lock_guard lock(mutex_);
  for (std::uint64_t i = from / kPieceBytes; i <= (from + bytes - 1) / kPieceBytes; ++i) {
    if (mine.pins[i] == nullptr) return false;
  }
  return true;
}

bool Pinner::wait(const PinnedSegment& segment, TimePoint deadline) const {
  const auto& mine = static_cast<const Segment&>(segment);
  std::unique_lock lock(mutex_);
  return settled_.wait_until(lock, deadline, [&mine] {
    return std::find(mine.settled.begin(), mine.settled.end(), false) == mine.settled.end();
  });
}

std::uint64_t Pinner::pinned_bytes() const {
  const std::lock_guard lock(mutex_);
  return pinned_bytes_;
}

std::optional<Error> Pinner::failure(const PinnedSegment& segment) const {
  const std::lock_guard lock(mutex_);
  return static_cast<const Segment&>(segment).failure;
}

}  // namespace rekindle::bucket
