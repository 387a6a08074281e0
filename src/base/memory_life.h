#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace rekindle {

// The life of some memory at one address. Parts that keep something for the memory, such as its
// registration with a NIC, hear of its end before the address gets other memory. Thread-safe.
class MemoryLife {
 public:
  MemoryLife() = default;
  ~MemoryLife() {
    for (const auto& call : calls_) call();
  }
  MemoryLife(const MemoryLife&) = delete;
  MemoryLife& operator=(const MemoryLife&) = delete;

  // `call` runs once, on the thread that ends the life. It must not block.
  void at_end(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
  }

 private:
  std::mutex mutex_;
  std::vector<std::function<void()>> calls_;  // guarded by mutex_
};

}  // namespace rekindle
