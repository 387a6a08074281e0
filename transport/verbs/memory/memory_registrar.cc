#include "transport/verbs/memory/memory_registrar.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "src/base/log.h"
#include "src/base/numa_nodes.h"
#include "src/base/units.h"
#include "transport/verbs/memory/device_share.h"
#include "transport/verbs/memory/page_touch.h"
#include "transport/verbs/memory/registered_region.h"

// Regions that are queued for a device take turns by one stride, so that a small region does not
// wait for a large one. One worker at a time serves a device. Callers block here only to release a
// region.
namespace rekindle::transport::verbs {
namespace {

constexpr std::size_t kMaxThreads = 16;
constexpr std::size_t kMaxTouchers = 8;

// The users' handle. The queues may hold the region a little longer.
class RegisteredRegion final : public RegisteredMemory {
 public:
  explicit RegisteredRegion(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  ~RegisteredRegion() override { region_->stop(); }

  std::span<const std::byte> bytes() const override { return region_->bytes(); }
  const Piece* find(const Device& device, std::uint64_t offset) const override {
    return region_->find(device.index(), offset);
  }
  std::vector<Piece> pieces(const Device& device) const override {
    return region_->pieces(device.index());
  }
  std::uint64_t change_count() const override { return region_->change_count(); }
  bool settled() const override { return region_->settled(); }
  bool wait_settled(TimePoint deadline) const override { return region_->wait_settled(deadline); }
  std::vector<Error> problems() const override { return region_->problems(); }

 private:
  const std::shared_ptr<Region> region_;
};

class MemoryRegistrarImpl final : public MemoryRegistrar {
 public:
  MemoryRegistrarImpl(Fabric& fabric, const RegistrarOptions& options);
  ~MemoryRegistrarImpl() override;

  std::shared_ptr<RegisteredMemory> add(std::span<const std::byte> bytes, MemoryUse use, int fd,
                                        std::uint64_t fd_offset,
                                        std::shared_ptr<const void> keep_alive) override;
  bool maps_files_for_writing() const override;
  bool keeps_idle_memory() const override { return keeps_idle_memory_; }
  RegistrarStats stats() const override;

 private:
  struct Queue {  // of one device
    std::deque<std::shared_ptr<Region>> regions;
    bool served = false;
  };
  void run(std::size_t thread);
  Queue* next_queue(std::size_t first);

  std::vector<std::unique_ptr<DeviceShare>> shares_;  // by Device::index()
  WorkerPool touchers_;
  std::atomic<std::int64_t> touching_ns_ = 0;
  const RegionPlan plan_;
  const bool keeps_idle_memory_;
  mutable std::mutex mutex_;
  std::condition_variable has_work_;
  std::vector<Queue> queues_;  // guarded by mutex_, by Device::index()
  bool stopping_ = false;      // guarded by mutex_
  std::vector<std::thread> threads_;
};

std::size_t toucher_count() {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, kMaxTouchers);
}

bool may_keep_idle_memory(const Fabric& fabric) {
  const LockLimit lock = read_lock_limit();
  const bool unlimited = lock.may_lock_any || lock.limit_bytes == ~std::uint64_t{0};
  return unlimited && std::ranges::none_of(fabric.devices(), [](const auto& device) {
           return device->api().marks_memory_for_forks();
         });
}

MemoryRegistrarImpl::MemoryRegistrarImpl(Fabric& fabric, const RegistrarOptions& options)
    : touchers_("rk-touch", fabric.devices().empty() ? 1 : toucher_count(), 1024),
      plan_{options.max_piece_bytes, usable_numa_nodes().size() > 1, &touchers_, &touching_ns_},
      keeps_idle_memory_(options.keeps_idle_memory.value_or(options.max_bytes_per_device == 0 &&
                                                            may_keep_idle_memory(fabric))) {
  for (const auto& device : fabric.devices()) {
    shares_.push_back(std::make_unique<DeviceShare>(*device, options.max_bytes_per_device));
  }
  queues_.resize(shares_.size());
  const std::size_t wanted = options.threads == 0 ? kMaxThreads : options.threads;
  for (std::size_t i = 0; i < std::min(wanted, shares_.size()); ++i) {
    threads_.emplace_back([this, i] { run(i); });
  }
}

MemoryRegistrarImpl::~MemoryRegistrarImpl() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  has_work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<RegisteredMemory> MemoryRegistrarImpl::add(std::span<const std::byte> bytes,
                                                           MemoryUse use, int fd,
                                                           std::uint64_t fd_offset,
                                                           std::shared_ptr<const void> keep_alive) {
  auto region =
      std::make_shared<Region>(bytes, use, fd, fd_offset, std::move(keep_alive), shares_, plan_);
  if (!region->settled()) {
    {
      const std::lock_guard lock(mutex_);
      for (Queue& queue : queues_) queue.regions.push_back(region);
    }
    has_work_.notify_all();
  }
  return std::make_shared<RegisteredRegion>(std::move(region));
}

bool MemoryRegistrarImpl::maps_files_for_writing() const {
  return std::ranges::any_of(shares_, [](const auto& share) { return refuses_read_only(*share); });
}

RegistrarStats MemoryRegistrarImpl::stats() const {
  RegistrarStats stats;
  for (const auto& share : shares_) {
    stats.bytes += share->bytes.load();
    stats.pieces += share->pieces.load();
    stats.failures += share->failures.load();
  }
  stats.touching = Duration(touching_ns_.load());
  return stats;
}

// Begins at `first`, so that the threads do not all try the same device.
MemoryRegistrarImpl::Queue* MemoryRegistrarImpl::next_queue(std::size_t first) {
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    Queue& queue = queues_[(first + i) % queues_.size()];
    if (!queue.served && !queue.regions.empty()) return &queue;
  }
  return nullptr;
}

void MemoryRegistrarImpl::run(std::size_t thread) {
  set_thread_name(fmt::format("rk-reg{}", thread));
  std::unique_lock lock(mutex_);
  while (true) {
    Queue* queue = nullptr;
    has_work_.wait(lock, [&] { return stopping_ || (queue = next_queue(thread)) != nullptr; });
    if (stopping_) return;
    std::shared_ptr<Region> region = std::move(queue->regions.front());
    queue->regions.pop_front();
    queue->served = true;
    const auto device = static_cast<std::size_t>(queue - queues_.data());
    lock.unlock();
    const bool finished = region->advance(device);
    lock.lock();
    queue->served = false;
    if (!finished) queue->regions.push_back(std::move(region));
    // This may release the last reference, so it happens without the lock.
    lock.unlock();
    region.reset();
    lock.lock();
    has_work_.notify_all();
  }
}

}  // namespace

std::unique_ptr<MemoryRegistrar> MemoryRegistrar::create(Fabric& fabric,
                                                         const RegistrarOptions& options) {
  return std::make_unique<MemoryRegistrarImpl>(fabric, options);
}

}  // namespace rekindle::transport::verbs
