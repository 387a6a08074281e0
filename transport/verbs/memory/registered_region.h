#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "src/base/worker_pool.h"
#include "transport/verbs/memory/device_share.h"
#include "transport/verbs/memory/memory_registrar.h"
#include "transport/verbs/memory/registration_limit.h"

// The registrations of one region on all devices. The region is cut into strides. A stride is
// faulted in once, checked for NUMA borders, and cut into pieces for each device. One worker at a
// time serves a device. It publishes its pieces without locks.
namespace rekindle::transport::verbs {

// [offset, offset + bytes) of a region.
struct Cut {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  bool operator==(const Cut&) const = default;
};

struct CutRules {
  // The device's maximum or the piece size, the smaller one.
  std::uint64_t max_bytes = std::uint64_t{1} << 30;
  std::uint64_t alignment = 2 << 20;  // borders lie on multiples of it (of the address)
  // The NUMA node of the page at this address; -1: unknown. Called once per `alignment`. Without
  // this function there are no cuts by node.
  std::function<int(std::uint64_t address)> node_at;
};

// The pieces in which a region of `bytes` at `address` is registered: complete, in order, and each
// on one NUMA node as far as is known. Pure.
std::vector<Cut> plan_pieces(std::uint64_t address, std::uint64_t bytes, const CutRules& rules);

struct RegionPlan {
  std::uint64_t max_piece_bytes = 0;
  bool several_nodes = false;
  // Helps to fault a stride in.
  WorkerPool* touchers = nullptr;
  // Sums up the time that this takes.
  std::atomic<std::int64_t>* touching_ns = nullptr;
};

class Region {
 public:
  Region(std::span<const std::byte> bytes, MemoryUse use, int fd, std::uint64_t fd_offset,
         std::shared_ptr<const void> keep_alive,
         std::span<const std::unique_ptr<DeviceShare>> shares, const RegionPlan& plan);
  ~Region() { stop(); }

  // Workers call this: registers the next stride on this device. True: nothing is left to do there.
  bool advance(std::size_t device);
  // Waits for the pieces that are being made, makes no more, deregisters, and releases the memory.
  void stop();

  std::span<const std::byte> bytes() const { return memory_.bytes(); }
  const Piece* find(std::size_t device, std::uint64_t offset) const;
  std::vector<Piece> pieces(std::size_t device) const;
  std::uint64_t change_count() const { return changes_.load(std::memory_order_acquire); }
  bool settled() const;
  bool wait_settled(TimePoint deadline) const;
  std::vector<Error> problems() const;

 private:
  struct Slot {
    Piece piece;
    MrHandle mr;
    std::atomic<bool> usable = false;  // set once, after the above
  };
  // Of one stride on one device, by offset.
  struct Slots {
    explicit Slots(std::size_t size) : count(size), slots(std::make_unique<Slot[]>(size)) {}
    std::size_t count;
    std::unique_ptr<Slot[]> slots;
  };
  struct Part {  // of one device
    Part(DeviceShare& of, std::size_t stride_count) : share(of), strides(stride_count) {}
    DeviceShare& share;
    // The worker's.
    std::size_t next_stride = 0;
    std::uint64_t too_large_bytes = ~std::uint64_t{0};  // pieces that need not be tried
    Cause too_large_cause = Cause::kOther;
    int too_large_error = 0;
    unsigned unexplained = 0;  // ENOMEM, in a row
    std::vector<std::unique_ptr<Slots>> owned;
    // For readers.
    std::vector<std::atomic<const Slots*>> strides;
    // Guarded by mutex_.
    bool working = false, done = false;
    std::uint64_t registered_bytes = 0;
    std::map<std::pair<Cause, int>, std::uint64_t> missing_bytes;
    LockLimit lock;
  };
  struct Stride {
    std::uint64_t offset = 0, bytes = 0;
    enum class State : std::uint8_t { kUntouched, kTouching, kTouched } state = State::kUntouched;
    int touch_error = 0;
    std::vector<int> nodes;  // one per alignment
  };

  void make_strides();
  std::uint64_t stride_of(std::uint64_t offset) const { return (offset + lead_) / stride_bytes_; }
  bool all_done() const;  // mutex_ is held
  // Every piece of the stride would be too large to be tried.
  bool hopeless(const Stride& stride, const Part& part) const;
  bool begin_step(Part& part, std::size_t& stride);
  bool end_step(Part& part, bool last);
  // Returns 0, or an errno that says why there are no pages. The first caller faults the pages in;
  // others wait.
  int touch(Stride& stride);
  int fault_in(const Stride& stride);
  std::vector<Cut> plan(const Stride& stride, const Part& part, std::span<const int> nodes) const;
  void register_stride(Part& part, std::size_t index);
  void register_slot(Part& part, Slot& slot, int touch_error);
  void note_failure(Part& part, const Slot& slot, Cause cause, int error, const LockLimit& lock);
  void refuse_rest(Part& part, const Slot& slot, Cause cause, int error);
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }

  RegionMemory memory_;
  const MemoryUse use_;
  std::shared_ptr<const void> keep_alive_;
  const RegionPlan plan_;
  std::uint64_t lead_ = 0;  // of the address past a multiple of the alignment
  std::uint64_t stride_bytes_ = 0;
  std::vector<std::unique_ptr<Part>> parts_;  // by Device::index()

  std::atomic<std::uint64_t> changes_ = 0;
  std::atomic<bool> stopped_ = false;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Stride> strides_;  // states are guarded by mutex_
};

}  // namespace rekindle::transport::verbs
