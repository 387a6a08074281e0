#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "src/base/clock.h"
#include "src/base/memory_life.h"
#include "src/base/result.h"
#include "src/base/worker_pool.h"
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/direct/op_expander.h"
#include "transport/verbs/memory/memory_registrar.h"

namespace rekindle::transport::verbs {

// Registered blocks of one device. Reads land here when they cannot land in their destination: it
// is not registered, or its runs are too short for a request each. Thread-safe.
class BouncePool {
 public:
  static constexpr std::uint32_t kBlockBytes = 256 << 10;
  static constexpr std::uint32_t kScratchBytes = 16 << 10;

  // Makes as many blocks as `bytes` hold, or fewer if the memlock limit is in the way; at least
  // one.
  static Result<std::unique_ptr<BouncePool>> create(Device& device, std::uint64_t bytes);
  ~BouncePool();
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;

  struct Block {
    std::byte* data = nullptr;  // kBlockBytes; null: none
    std::uint32_t lkey = 0;
  };
  // Without data when all blocks are in use: call it again after a release.
  Block acquire();
  void release(Block block);
  // kScratchBytes that any thread may read into at any time. The bytes have no meaning.
  Block scratch() const { return {memory_ + bytes_ - kScratchBytes, mr_->lkey}; }

 private:
  BouncePool() = default;

  std::byte* memory_ = nullptr;
  // Mapped: the blocks, then scratch().
  std::size_t bytes_ = 0;
  MrHandle mr_;
  std::mutex mutex_;
  std::vector<std::byte*> free_;  // guarded by mutex_
};

// The memory of this process that reads may land in. Thread-safe. A poller looks it up in a
// LocalMemoryView of its own, without locks.
class LocalMemory : public std::enable_shared_from_this<LocalMemory> {
 public:
  explicit LocalMemory(MemoryRegistrar& registrar) : registrar_(registrar) {}

  // Registers memory as long as the result lives. Paths that read into it must be gone before. If
  // the memory has a `life` and the registrar keeps idle memory, a complete registration stays
  // until the life ends, and the next add() of this memory uses it.
  std::shared_ptr<const void> add(std::span<std::byte> memory, std::shared_ptr<MemoryLife> life);
  // Registers memory for later uses. Returns when it is registered or has failed, or at `deadline`.
  void prepare(std::span<std::byte> memory, std::shared_ptr<MemoryLife> life, TimePoint deadline);
  // The same for memory that is registered already, and not kept.
  std::shared_ptr<const void> add(std::shared_ptr<const RegisteredMemory> registered);
  // Warns of memory that could not be registered so far, once for each kind of problem.
  void say_problems();

 private:
  friend class LocalMemoryView;
  struct Entry {
    const std::byte* begin = nullptr;
    std::uint64_t bytes = 0;
    const RegisteredMemory* registered = nullptr;
  };
  using Entries = std::vector<Entry>;  // sorted by address
  using Registered = std::shared_ptr<RegisteredMemory>;
  void insert(const RegisteredMemory& registered);
  Registered take(std::span<std::byte> memory, bool has_life);
  void release(Registered registered, const std::shared_ptr<MemoryLife>& life);
  void keep(Registered registered, MemoryLife& life);
  // The life of a kept registration has ended.
  void forget(const std::byte* begin);
  void remove(const RegisteredMemory* registered);
  std::shared_ptr<const Entries> entries() const;
  void publish(Entries entries);  // locked

  MemoryRegistrar& registrar_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Entries> entries_ = std::make_shared<Entries>();  // guarded by mutex_
  std::set<ErrorCode> said_;                                              // guarded by mutex_
  // Registrations that nobody uses, by address.
  std::map<const std::byte*, Registered> kept_;  // guarded by mutex_
  // The addresses whose lives call forget().
  std::set<const std::byte*> watched_;  // guarded by mutex_
  std::atomic<std::uint64_t> version_ = 0;
  // Deregisters, which takes as long as pinning did.
  WorkerPool forgetter_{"rk-forget", 1, std::numeric_limits<std::size_t>::max()};
};

// One poller thread's view of LocalMemory, for one device.
class LocalMemoryView {
 public:
  LocalMemoryView(std::shared_ptr<const LocalMemory> memory, const Device& device)
      : memory_(std::move(memory)), device_(device) {}

  // Call this before a group of lookups. It sees all memory that was added before an op was posted.
  void refresh();
  LocalSpan find(const std::byte* address) const;

 private:
  const std::shared_ptr<const LocalMemory> memory_;
  const Device& device_;
  std::uint64_t version_ = ~std::uint64_t{0};
  std::shared_ptr<const LocalMemory::Entries> entries_;
};

}  // namespace rekindle::transport::verbs
