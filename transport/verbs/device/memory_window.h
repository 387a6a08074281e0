#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "src/base/result.h"
#include "transport/verbs/device/verbs_api.h"

namespace rekindle::transport::verbs {

class Device;

// The windows of one device: `allocated` now, the rest since the start. Thread-safe.
struct WindowCounts {
  std::atomic<std::uint64_t> allocated = 0;
  std::atomic<std::uint64_t> bound = 0;
  std::atomic<std::uint64_t> invalidated = 0;
  std::atomic<std::uint64_t> refused = 0;
};

// A memory window of type 2B. It belongs to the queue pair that binds it.
class MemoryWindow {
 public:
  // kExhausted: the device has none left. The message is its reason only.
  static Result<MemoryWindow> allocate(Device& device);
  MemoryWindow() = default;
  MemoryWindow(MemoryWindow&&) = default;
  MemoryWindow& operator=(MemoryWindow&& other) noexcept;
  ~MemoryWindow() { deallocate(); }

  void deallocate();
  explicit operator bool() const { return handle_ != nullptr; }
  // Of the binding.
  std::uint32_t key() const { return key_; }
  ibv_send_wr binding(ibv_mr* mr, std::uint64_t address, std::uint64_t bytes) const;
  ibv_send_wr invalidation() const;

 private:
  MwHandle handle_;
  std::uint32_t key_ = 0;
  WindowCounts* counts_ = nullptr;
};

}  // namespace rekindle::transport::verbs
