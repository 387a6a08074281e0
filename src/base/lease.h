#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace rekindle {

// The right that something stays as it is until the holder ends the lease: a file, a pause, a
// place. Copies share the right, which ends with the last of them. An empty lease holds nothing.
class [[nodiscard]] Lease {
 public:
  Lease() = default;
  explicit operator bool() const { return right_ != nullptr; }
  void reset() { right_.reset(); }

 private:
  friend class LeaseGrantor;
  explicit Lease(std::shared_ptr<const void> right) : right_(std::move(right)) {}

  std::shared_ptr<const void> right_;
};

// Grants leases and knows whether any is still held. Leases may outlive their grantor. One thread
// uses the grantor and its leases.
class LeaseGrantor {
 public:
  // `on_free` runs each time that the last lease ends, while the grantor lives.
  explicit LeaseGrantor(std::function<void()> on_free = {})
      : on_free_(std::make_shared<std::function<void()>>(std::move(on_free))) {}
  LeaseGrantor(const LeaseGrantor&) = delete;
  LeaseGrantor& operator=(const LeaseGrantor&) = delete;

  Lease grant() {
    auto right = right_.lock();
    if (right == nullptr) {
      right = std::shared_ptr<const void>(this, [on_free = std::weak_ptr(on_free_)](const void*) {
        const auto free = on_free.lock();
        if (free != nullptr && *free) (*free)();
      });
      right_ = right;
    }
    return Lease(std::move(right));
  }
  bool held() const { return !right_.expired(); }

 private:
  const std::shared_ptr<const std::function<void()>> on_free_;
  std::weak_ptr<const void> right_;
};

}  // namespace rekindle
