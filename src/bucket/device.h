#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "src/base/blake3_box.h"
#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// What the bucket pipeline needs of a GPU, in the words of CUDA: memory that two processes share,
// streams whose work runs in order, events that order streams, also over processes. Behind it is
// src/cuda, or a double in host memory (double_device.h).
namespace rekindle::bucket {

inline constexpr std::uint64_t kMostDigestedBytes = std::uint64_t{1} << 20;  // of a box

// In a device's memory, as this process sees it; of the double: a plain pointer.
using DeviceAddress = std::uint64_t;

// `rows` runs of `run_bytes`; the strides, in bytes, matter for more than one row.
struct Upload {
  const std::byte* from = nullptr;  // host memory, at full speed when it is pinned
  DeviceAddress to = 0;
  std::uint64_t run_bytes = 0;
  std::uint64_t rows = 1;
  std::uint64_t from_stride = 0;
  std::uint64_t to_stride = 0;
};
struct Move {  // inside the device
  DeviceAddress from = 0;
  DeviceAddress to = 0;
  std::uint64_t bytes = 0;
};
struct Download {  // the other way; `bytes` of each row
  DeviceAddress from = 0;
  std::byte* to = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t rows = 1;
  std::uint64_t from_stride = 0;
  std::uint64_t to_stride = 0;
};

// Lets another process of this host open memory or an event. For that process only; never logged.
struct Handle {
  std::string bytes;
  UniqueFd fd;  // of the double
};

class Memory {
 public:
  virtual ~Memory() = default;  // frees or unmaps; no work that uses it may be queued
  virtual DeviceAddress address() const = 0;
  virtual std::uint64_t bytes() const = 0;
};
class Event {
 public:
  virtual ~Event() = default;
};
// Host memory that the device reads without a detour.
class Pin {
 public:
  virtual ~Pin() = default;  // no work that uses it may be queued
};

// The results of Stream::digest(), in host memory.
class Digests {
 public:
  virtual ~Digests() = default;  // no work that uses it may be queued
  virtual std::size_t capacity() const = 0;
  // Those of the last batch, in the order of its boxes, once the device has done it.
  virtual std::span<const Digest> values() const = 0;
};

// Work in order. Calls queue and return; what fails on the device shows in a later call as
// kInternal, and then for ever. One thread at a time.
class Stream {
 public:
  virtual ~Stream() = default;  // waits for what is queued, unless it is borrowed
  virtual Result<void> upload(std::span<const Upload> copies) = 0;
  virtual Result<void> move(std::span<const Move> copies) = 0;
  virtual Result<void> download(std::span<const Download> copies) = 0;
  // The BLAKE3 of boxes in this device's memory, of at most kMostDigestedBytes and one byte at
  // least each. At most into.capacity() of them; the batch before in `into` has been done.
  virtual Result<void> digest(std::span<const BoxBytes> boxes, Digests& into) = 0;
  virtual Result<void> record(Event& event) = 0;
  // Later work of this stream starts after what `event` was last recorded behind, as of now; an
  // event that was never recorded holds nothing up.
  virtual Result<void> wait(Event& event) = 0;
  // kTimeout when the queue has not emptied by then; nothing is taken back.
  virtual Result<void> finish(TimePoint deadline) = 0;
};

struct DeviceMemory {
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
};

// Thread-safe. What comes of it lives no longer than it does.
class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& id()
      const = 0;  // "GPU-6f2c…" or "double:0", the same in all processes
  virtual const std::string& name() const = 0;  // "NVIDIA H200"
  virtual Result<DeviceMemory> memory() const = 0;
  // Aligned to 256 bytes at least. kExhausted.
  virtual Result<std::unique_ptr<Memory>> allocate(std::uint64_t bytes) = 0;
  virtual Result<std::unique_ptr<Event>> make_event() = 0;  // may be shared
  virtual Result<std::unique_ptr<Stream>> make_stream() = 0;
  // A CUstream or cudaStream_t of the caller's, who keeps it alive; null: the default stream.
  virtual Result<std::unique_ptr<Stream>> borrow_stream(void* stream) = 0;
  // Room for the digests of `capacity` boxes. kUnavailable: this device cannot compute digests, say
  // because its driver lacks the compiler; kExhausted.
  virtual Result<std::unique_ptr<Digests>> make_digests(std::size_t capacity) = 0;
  // Whether what `event` was last recorded behind has been done; true when it never was.
  virtual Result<bool> is_done(const Event& event) = 0;
  // kExhausted; kUnavailable: this kind of memory cannot be pinned. Copies from it work, slower.
  virtual Result<std::unique_ptr<Pin>> pin(std::span<const std::byte> memory) = 0;

  // For the process that opens them: kUnavailable where the two cannot share (another container,
  // a MIG slice, a driver that refuses).
  virtual Result<Handle> share(Memory& memory) = 0;
  virtual Result<Handle> share(Event& event) = 0;
  virtual Result<std::unique_ptr<Memory>> open_memory(const Handle& handle,
                                                      std::uint64_t bytes) = 0;
  virtual Result<std::unique_ptr<Event>> open_event(const Handle& handle) = 0;
};

}  // namespace rekindle::bucket
