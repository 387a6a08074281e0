#pragma once

#include <memory>
#include <utility>

#include "src/bucket/device.h"
#include "src/cuda/handles.h"

// Private to src/cuda: memory, events and pins.
namespace rekindle::cuda {

// Owner: MemoryHandle or OpenedMemoryHandle.
template <typename Owner>
class CudaMemory final : public bucket::Memory {
 public:
  CudaMemory(std::shared_ptr<const Context> context, CUdeviceptr address, std::uint64_t bytes)
      : owner_(std::move(context), address), bytes_(bytes) {}
  bucket::DeviceAddress address() const override { return owner_.get(); }
  std::uint64_t bytes() const override { return bytes_; }

 private:
  const Owner owner_;
  const std::uint64_t bytes_;
};

class CudaEvent final : public bucket::Event {
 public:
  CudaEvent(std::shared_ptr<const Context> context, CUevent event)
      : owner_(std::move(context), event) {}
  CUevent get() const { return owner_.get(); }

 private:
  const EventHandle owner_;
};

// Registrations knows the memory as long as the pin lives.
class CudaPin final : public bucket::Pin {
 public:
  CudaPin(std::shared_ptr<const Context> context, std::span<const std::byte> memory)
      : owner_(std::move(context), const_cast<std::byte*>(memory.data())), memory_(memory) {
    owner_.context().driver().registrations().add(memory_);
  }
  ~CudaPin() override { owner_.context().driver().registrations().remove(memory_); }

 private:
  const RegistrationHandle owner_;
  const std::span<const std::byte> memory_;
};

}  // namespace rekindle::cuda
