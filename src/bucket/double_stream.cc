#include "src/bucket/double_stream.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "src/base/blake3.h"

namespace rekindle::bucket {

namespace {

using std::chrono::microseconds;

// For a stream that waits for an event that may never come, for example because its recorder has
// died.
constexpr std::chrono::seconds kDoubleDrainTime{2};
constexpr microseconds kLongestSleep{100};
constexpr std::uint64_t kCopyStep = 1 << 20;

bool copy(std::byte* to, const std::byte* from, std::uint64_t bytes,
          const std::atomic<bool>& stop) {
  for (std::uint64_t at = 0; at < bytes; at += kCopyStep) {
    if (stop.load(std::memory_order_relaxed)) return false;
    std::memcpy(to + at, from + at, std::min(kCopyStep, bytes - at));
  }
  return true;
}

std::byte* host_pointer(DeviceAddress address) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

bool do_upload(const Upload& upload, const std::atomic<bool>& stop) {
  for (std::uint64_t row = 0; row < upload.rows; ++row) {
    if (stop.load(std::memory_order_relaxed)) return false;
    if (!copy(host_pointer(upload.to) + row * upload.to_stride,
              upload.from + row * upload.from_stride, upload.run_bytes, stop)) {
      return false;
    }
  }
  return true;
}

bool do_download(const Download& download, const std::atomic<bool>& stop) {
  for (std::uint64_t row = 0; row < download.rows; ++row) {
    if (stop.load(std::memory_order_relaxed)) return false;
    if (!copy(download.to + row * download.to_stride,
              host_pointer(download.from) + row * download.from_stride, download.bytes, stop)) {
      return false;
    }
  }
  return true;
}

bool wait_for(const EventState& state, std::uint64_t sequence, const std::atomic<bool>& stop) {
  microseconds pause{1};
  while (state.completed.load() < sequence) {
    if (stop.load(std::memory_order_relaxed)) return false;
    nap(pause);
  }
  return true;
}

void complete(EventState& state, std::uint64_t sequence) {
  std::uint64_t before = state.completed.load();
  while (before < sequence && !state.completed.compare_exchange_weak(before, sequence)) {
  }
}

class DoubleStream final : public Stream {
 public:
  DoubleStream(std::shared_ptr<DoubleQueue> queue, const Device& device)
      : queue_(std::move(queue)), device_(device) {}
  DoubleQueue& queue() { return *queue_; }
  ~DoubleStream() override { queue_->wait_empty(SteadyClock().now() + kDoubleDrainTime); }

  Result<void> upload(std::span<const Upload> copies) override {
    queue_->push([all = std::vector(copies.begin(), copies.end())](const auto& stop) {
      return std::all_of(all.begin(), all.end(),
                         [&](const Upload& c) { return do_upload(c, stop); });
    });
    return {};
  }
  Result<void> move(std::span<const Move> copies) override {
    queue_->push([all = std::vector(copies.begin(), copies.end())](const auto& stop) {
      return std::all_of(all.begin(), all.end(), [&](const Move& c) {
        return copy(host_pointer(c.to), host_pointer(c.from), c.bytes, stop);
      });
    });
    return {};
  }
  Result<void> download(std::span<const Download> copies) override {
    queue_->push([all = std::vector(copies.begin(), copies.end())](const auto& stop) {
      return std::all_of(all.begin(), all.end(),
                         [&](const Download& c) { return do_download(c, stop); });
    });
    return {};
  }
  Result<void> digest(std::span<const BoxBytes> boxes, Digests& into) override {
    if (boxes.size() > into.capacity()) {
      return fail(ErrorCode::kInvalid, "digest {} boxes with room for {}", boxes.size(),
                  into.capacity());
    }
    const std::span<Digest> results = static_cast<DoubleDigests&>(into).begin(boxes.size());
    queue_->push([all = std::vector(boxes.begin(), boxes.end()), results](const auto& stop) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (stop.load(std::memory_order_relaxed)) return false;
        results[i] = blake3_of_box(all[i]);
      }
      return true;
    });
    return {};
  }
  Result<void> record(Event& event) override {
    auto page = static_cast<DoubleEvent&>(event).shared_page();
    const std::uint64_t sequence = page->state().recorded.fetch_add(1) + 1;
    queue_->push([page = std::move(page), sequence](const auto& /*stop*/) {
      complete(page->state(), sequence);
      return true;
    });
    return {};
  }
  // On a GPU, the driver may crash.
  Result<void> wait(Event& event) override {
    const auto& awaited = static_cast<DoubleEvent&>(event);
    if (awaited.only_for() != nullptr && awaited.only_for() != &device_) {
      return fail(ErrorCode::kInvalid, "a shareable event of another device than {}", device_.id());
    }
    auto page = awaited.shared_page();
    const std::uint64_t sequence = page->state().recorded.load();
    queue_->push([page = std::move(page), sequence](const auto& stop) {
      return wait_for(page->state(), sequence, stop);
    });
    return {};
  }
  Result<void> finish(TimePoint deadline) override {
    if (queue_->wait_empty(deadline)) return {};
    return fail(ErrorCode::kTimeout, "the work of a double device's stream is not done yet");
  }

 private:
  const std::shared_ptr<DoubleQueue> queue_;
  const Device& device_;
};

}  // namespace

Result<UniqueFd> make_memfd(const char* name, std::uint64_t bytes) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(errno, "create a memfd for a double device");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return fail_errno(errno, "size a memfd for a double device");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return fail_errno(errno, "seal a memfd for a double device");
  }
  return fd;
}

bool has_fixed_size(int fd, std::uint64_t bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  struct stat info {};
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(fd, &info) == 0 &&
         info.st_size >= 0 && static_cast<std::uint64_t>(info.st_size) >= bytes;
}

namespace {

int protection_of(Access access) {
  return access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
}

}  // namespace

Result<std::unique_ptr<Mapping>> Mapping::of(int fd, std::uint64_t bytes, Access access) {
  void* data = ::mmap(nullptr, bytes, protection_of(access), MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return fail_errno(errno, "map a memfd of a double device");
  return std::unique_ptr<Mapping>(new Mapping(data, bytes, access));
}

Result<void> Mapping::set_access(Access access) {
  if (::mprotect(data_, bytes_, protection_of(access)) != 0) {
    return fail_errno(errno, "change the access to a memfd of a double device");
  }
  access_ = access;
  return {};
}

Mapping::~Mapping() { ::munmap(data_, bytes_); }

DoubleQueue::DoubleQueue() : thread_([this] { run(); }) {}

DoubleQueue::~DoubleQueue() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DoubleQueue::push(Work work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

bool DoubleQueue::wait_empty(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return work_.empty(); });
}

void DoubleQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !work_.empty(); });
    if (stop_) return;
    // Others push behind it, and the elements of a deque do not move.
    Work& work = work_.front();
    lock.unlock();
    const bool done = work(stop_);
    lock.lock();
    if (!done) return;
    work_.pop_front();
    if (work_.empty()) changed_.notify_all();
  }
}

std::unique_ptr<Stream> make_double_stream(std::shared_ptr<DoubleQueue> queue,
                                           const Device& device) {
  return std::make_unique<DoubleStream>(std::move(queue), device);
}

Result<void> push_work(Stream& stream, DoubleQueue::Work work) {
  auto* const own = dynamic_cast<DoubleStream*>(&stream);
  if (own == nullptr) return fail(ErrorCode::kInvalid, "this is no stream of a double device");
  own->queue().push(std::move(work));
  return {};
}

void nap(std::chrono::microseconds& length) {
  std::this_thread::sleep_for(length);
  length = std::min(2 * length, kLongestSleep);
}

}  // namespace rekindle::bucket
