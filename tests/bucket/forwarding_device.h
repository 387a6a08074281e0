#pragma once

#include "src/bucket/device.h"

namespace rekindle::bucket::testing {

// Another device in all that a test does not change.
class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(Device& device) : device_(device) {}
  const std::string& id() const override { return device_.id(); }
  const std::string& name() const override { return device_.name(); }
  Result<DeviceMemory> memory() const override { return device_.memory(); }
  Result<std::unique_ptr<Memory>> allocate(std::uint64_t bytes) override {
    return device_.allocate(bytes);
  }
  Result<std::unique_ptr<Event>> make_event() override { return device_.make_event(); }
  Result<std::unique_ptr<Event>> make_local_event() override { return device_.make_local_event(); }
  Result<std::unique_ptr<Stream>> make_stream() override { return device_.make_stream(); }
  Result<std::unique_ptr<Stream>> borrow_stream(void* stream) override {
    return device_.borrow_stream(stream);
  }
  Result<std::unique_ptr<Digests>> make_digests(std::size_t capacity) override {
    return device_.make_digests(capacity);
  }
  Result<bool> is_done(const Event& event) override { return device_.is_done(event); }
  Result<std::unique_ptr<Pin>> pin(std::span<const std::byte> memory) override {
    return device_.pin(memory);
  }
  Result<Handle> share(Memory& memory) override { return device_.share(memory); }
  Result<Handle> share(Event& event) override { return device_.share(event); }
  Result<std::unique_ptr<Memory>> open_memory(const Handle& handle, std::uint64_t bytes) override {
    return device_.open_memory(handle, bytes);
  }
  Result<std::unique_ptr<Event>> open_event(const Handle& handle) override {
    return device_.open_event(handle);
  }
  Result<std::unique_ptr<Block>> allocate_block(std::uint64_t bytes) override {
    return device_.allocate_block(bytes);
  }
  Result<std::unique_ptr<Block>> open_block(const UniqueFd& block, std::uint64_t bytes,
                                            Access access) override {
    return device_.open_block(block, bytes, access);
  }
  Result<void> reach_peer(Device& peer) override { return device_.reach_peer(peer); }

 private:
  Device& device_;
};

// A device whose digests the host computes.
class WithoutDigests final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  Result<std::unique_ptr<Digests>> make_digests(std::size_t /*capacity*/) override {
    return fail(ErrorCode::kUnavailable, "no compiler here");
  }
};

}  // namespace rekindle::bucket::testing
