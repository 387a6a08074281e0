#include "transport/verbs/memory/local_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/mman.h>

#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::transport::verbs {

std::shared_ptr<const void> LocalMemory::add(std::span<std::byte> memory,
                                             std::shared_ptr<MemoryLife> life) {
  Registered registered = take(memory, life != nullptr);
  insert(*registered);
  const void* const use = registered.get();
  return {use, [self = shared_from_this(), registered = std::move(registered),
                life = std::move(life)](const void*) mutable {
            self->remove(registered.get());
            self->release(std::move(registered), life);
            life.reset();
          }};
}

std::shared_ptr<const void> LocalMemory::add(std::shared_ptr<const RegisteredMemory> registered) {
  insert(*registered);
  const void* const use = registered.get();
  return {use,
          [self = shared_from_this(), registered = std::move(registered)](const void*) mutable {
            self->remove(registered.get());
            registered.reset();
          }};
}

void LocalMemory::insert(const RegisteredMemory& registered) {
  const std::lock_guard lock(mutex_);
  Entries entries = *entries_;
  const auto memory = registered.bytes();
  const Entry entry{memory.data(), memory.size(), &registered};
  entries.insert(std::upper_bound(entries.begin(), entries.end(), entry,
                                  [](const Entry& a, const Entry& b) {
                                    return std::less<>()(a.begin, b.begin);
                                  }),
                 entry);
  publish(std::move(entries));
}

void LocalMemory::prepare(std::span<std::byte> memory, std::shared_ptr<MemoryLife> life,
                          TimePoint deadline) {
  if (!registrar_.keeps_idle_memory()) return;
  Registered registered = take(memory, true);
  (void)registered->wait_settled(deadline);
  release(std::move(registered), life);
}

LocalMemory::Registered LocalMemory::take(std::span<std::byte> memory, bool has_life) {
  Registered registered;
  if (has_life) {
    const std::lock_guard lock(mutex_);
    const auto kept = kept_.find(memory.data());
    if (kept != kept_.end()) {
      registered = std::move(kept->second);
      kept_.erase(kept);
    }
  }
  // Another size is no use of the same memory, but its life goes on.
  if (registered != nullptr && registered->bytes().size() == memory.size()) return registered;
  return registrar_.add(memory, MemoryUse::kLand, -1, 0, nullptr);
}

// The life outlives this call, so it cannot end between the look and the keeping.
void LocalMemory::release(Registered registered, const std::shared_ptr<MemoryLife>& life) {
  const bool complete = registered->settled() && registered->problems().empty();
  if (life != nullptr && complete && registrar_.keeps_idle_memory()) {
    keep(std::move(registered), *life);
  }
}

void LocalMemory::keep(Registered registered, MemoryLife& life) {
  const std::byte* const begin = registered->bytes().data();
  {
    const std::lock_guard lock(mutex_);
    kept_.insert_or_assign(begin, std::move(registered));
    if (!watched_.insert(begin).second) return;
  }
  life.at_end([memory = weak_from_this(), begin] {
    if (const auto self = memory.lock()) self->forget(begin);
  });
}

void LocalMemory::forget(const std::byte* begin) {
  Registered registered;
  {
    const std::lock_guard lock(mutex_);
    watched_.erase(begin);
    const auto kept = kept_.find(begin);
    if (kept == kept_.end()) return;
    registered = std::move(kept->second);
    kept_.erase(kept);
  }
  forgetter_.submit([registered = std::move(registered)]() mutable { registered.reset(); });
}

void LocalMemory::remove(const RegisteredMemory* registered) {
  say_problems();
  const std::lock_guard lock(mutex_);
  Entries entries = *entries_;
  std::erase_if(entries, [&](const Entry& entry) { return entry.registered == registered; });
  publish(std::move(entries));
}

// Under the lock: whoever removes an entry waits, so that what it points to is there.
void LocalMemory::say_problems() {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : *entries_) {
    for (const Error& problem : entry.registered->problems()) {
      const bool gone = problem.code() == ErrorCode::kUnavailable;  // the fabric has said so
      if (gone || !said_.insert(problem.code()).second) continue;
      log::warn("verbs.not_registered", "why", problem, "read", "through bounce buffers, slower");
    }
  }
}

void LocalMemory::publish(Entries entries) {
  entries_ = std::make_shared<const Entries>(std::move(entries));
  version_.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<const LocalMemory::Entries> LocalMemory::entries() const {
  const std::lock_guard lock(mutex_);
  return entries_;
}

void LocalMemoryView::refresh() {
  const std::uint64_t version = memory_->version_.load(std::memory_order_acquire);
  if (version == version_) return;
  entries_ = memory_->entries();
  version_ = version;
}

LocalSpan LocalMemoryView::find(const std::byte* address) const {
  const auto after = std::upper_bound(
      entries_->begin(), entries_->end(), address,
      [](const std::byte* at, const auto& entry) { return std::less<>()(at, entry.begin); });
  if (after == entries_->begin()) return {};
  const auto& entry = *std::prev(after);
  const auto offset = static_cast<std::uint64_t>(address - entry.begin);
  if (offset >= entry.bytes) return {};
  const Piece* piece = entry.registered->find(device_, offset);
  if (piece == nullptr) return {};
  return {piece->lkey, piece->offset + piece->bytes - offset};
}

Result<std::unique_ptr<BouncePool>> BouncePool::create(Device& device, std::uint64_t bytes) {
  std::unique_ptr<BouncePool> pool(new BouncePool);
  int error = 0;
  for (std::uint64_t blocks = std::max<std::uint64_t>(bytes / kBlockBytes, 1); blocks > 0;
       blocks /= 2) {
    const std::uint64_t size = blocks * kBlockBytes + kScratchBytes;
    void* memory =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return fail_errno(errno, "bounce buffers: mmap");
    // A child must not share pages that a NIC writes to.
    (void)::madvise(memory, size, MADV_DONTFORK);
    pool->mr_ = MrHandle(device.api().reg_mr(device.pd(), memory, size, IBV_ACCESS_LOCAL_WRITE),
                         {&device.api()});
    if (pool->mr_) {
      pool->memory_ = static_cast<std::byte*>(memory);
      pool->bytes_ = size;
      break;
    }
    error = errno;
    ::munmap(memory, size);
  }
  if (!pool->mr_) {
    return fail(ErrorCode::kExhausted,
                "{}: not even {} of bounce buffers can be registered: {}; raise `ulimit -l`",
                device.name(), format_bytes(kBlockBytes + kScratchBytes), std::strerror(error));
  }
  for (std::size_t at = pool->bytes_ - kScratchBytes; at > 0; at -= kBlockBytes) {
    pool->free_.push_back(pool->memory_ + at - kBlockBytes);
  }
  return pool;
}

BouncePool::~BouncePool() {
  mr_.reset();
  if (memory_ != nullptr) ::munmap(memory_, bytes_);
}

BouncePool::Block BouncePool::acquire() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return {};
  std::byte* const data = free_.back();
  free_.pop_back();
  return {data, mr_->lkey};
}

void BouncePool::release(Block block) {
  const std::lock_guard lock(mutex_);
  free_.push_back(block.data);
}

}  // namespace rekindle::transport::verbs
