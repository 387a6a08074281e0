#pragma once

#include <memory>

#include "src/bucket/device.h"
#include "src/cuda/api.h"
#include "src/cuda/driver.h"

// Private to src/cuda.
namespace rekindle::cuda {

// A device's primary context. CUDA's runtime, and with it the worker's framework, uses the same
// one. Thread-safe.
class Context {
 public:
  static Result<std::shared_ptr<const Context>> retain(std::shared_ptr<const Driver> driver,
                                                       CUdevice device);
  ~Context() { api().primary_context_release(device_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const { return *driver_; }
  const Api& api() const { return driver_->api(); }
  CUdevice device() const { return device_; }
  CUcontext get() const { return context_; }

  // Makes the call with this context current, then restores the thread's own context.
  template <typename Call>
  CUresult run(Call&& call) const {
    if (const CUresult pushed = api().context_push(context_); pushed != CUDA_SUCCESS) return pushed;
    const CUresult result = call();
    CUcontext popped = nullptr;
    api().context_pop(&popped);
    return result;
  }

 private:
  Context(std::shared_ptr<const Driver> driver, CUdevice device, CUcontext context)
      : driver_(std::move(driver)), device_(device), context_(context) {}

  const std::shared_ptr<const Driver> driver_;
  const CUdevice device_;
  const CUcontext context_;
};

// Owns an object of a context. A failure to destroy it is ignored: an earlier call has failed then,
// or the context is lost.
template <typename T, auto kDestroy>
class Handle {
 public:
  Handle(std::shared_ptr<const Context> context, T object)
      : context_(std::move(context)), object_(object) {}
  ~Handle() {
    if (object_ != T{}) context_->run([this] { return (context_->api().*kDestroy)(object_); });
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  T get() const { return object_; }
  const Context& context() const { return *context_; }

 private:
  const std::shared_ptr<const Context> context_;
  const T object_;
};

using StreamHandle = Handle<CUstream, &Api::stream_destroy>;
using EventHandle = Handle<CUevent, &Api::event_destroy>;
using MemoryHandle = Handle<CUdeviceptr, &Api::memory_free>;
using OpenedMemoryHandle = Handle<CUdeviceptr, &Api::ipc_close_memory_handle>;
using RegistrationHandle = Handle<void*, &Api::host_unregister>;

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
