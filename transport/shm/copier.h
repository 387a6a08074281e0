#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <thread>

#include "src/base/unique_fd.h"
#include "transport/path.h"
#include "transport/read_op.h"
#include "transport/shm/region_client.h"

namespace rekindle::transport::shm {

// A bounded queue between one producing and one consuming thread, without locks or allocation.
template <typename T, std::size_t kCapacity>
class SpscRing {
  static_assert((kCapacity & (kCapacity - 1)) == 0, "a power of two");

 public:
  bool push(const T& value) {  // producer
    const std::size_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - head_.load(std::memory_order_acquire) == kCapacity) return false;
    slots_[tail % kCapacity] = value;
    tail_.store(tail + 1, std::memory_order_seq_cst);
    return true;
  }
  std::optional<T> pop() {  // consumer
    const std::size_t head = head_.load(std::memory_order_relaxed);
    if (head == tail_.load(std::memory_order_seq_cst)) return std::nullopt;
    const T value = slots_[head % kCapacity];
    head_.store(head + 1, std::memory_order_release);
    return value;
  }
  bool empty() const {  // consumer
    return head_.load(std::memory_order_relaxed) == tail_.load(std::memory_order_seq_cst);
  }

 private:
  std::array<T, kCapacity> slots_{};
  alignas(64) std::atomic<std::size_t> head_ = 0;
  alignas(64) std::atomic<std::size_t> tail_ = 0;
};

// The thread of one path: it takes ops, copies, and hands completions back. It looks at the side
// channel between pieces of a megabyte and while it is idle. So an abort or the peer's end takes
// effect within one piece, and an idle path lets go at once.
class Copier {
 public:
  static constexpr std::size_t kMaxInFlight = 256;

  explicit Copier(RegionClient& regions);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;
  Result<void> start();

  // The owner's thread calls these. It pushes at most kMaxInFlight ops that it has not popped.
  void push(std::span<const ReadOp> ops);
  std::size_t pop(std::span<Completion> out);
  void abort();
  bool peer_gone() const { return peer_gone_.load(std::memory_order_acquire); }
  std::uint64_t bytes_landed() const { return bytes_landed_.load(std::memory_order_relaxed); }
  int done_fd() const { return done_fd_.get(); }

 private:
  void run();
  void sleep();
  OpStatus copy(const ReadOp& op);
  OpStatus copy_pieces(const ReadOp& op, std::span<const std::byte> source);
  void finish(const Completion& completion);
  void run_near_the_owner();
  void notify();
  bool stopped() const { return abort_.load(std::memory_order_relaxed); }

  RegionClient& regions_;
  bool placed_ = false;  // owner's thread only
  UniqueFd wake_fd_;     // to the thread: work, abort or stop
  UniqueFd done_fd_;     // to the owner: completions
  SpscRing<ReadOp, kMaxInFlight> work_;
  SpscRing<Completion, kMaxInFlight> done_;
  std::atomic<bool> sleeping_ = false;
  // done_fd_ is readable, and its owner has not looked yet.
  std::atomic<bool> signalled_ = false;
  std::atomic<bool> abort_ = false;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> peer_gone_ = false;
  std::atomic<std::uint64_t> bytes_landed_ = 0;
  std::thread thread_;
};

}  // namespace rekindle::transport::shm
