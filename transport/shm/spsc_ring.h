#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <optional>

namespace rekindle::transport::shm {

// A bounded queue between one producing and one consuming thread; no locks, no allocation.
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

}  // namespace rekindle::transport::shm
