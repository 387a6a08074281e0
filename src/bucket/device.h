#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "src/base/blake3_core.h"
#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// The part of a GPU that the bucket pipeline needs, in terms of CUDA: memory that two processes
// share, streams whose work runs in order, and events that order streams, also across processes.
// src/cuda implements it, and double_device.h in host memory.
namespace rekindle::bucket {

// Of one box.
inline constexpr std::uint64_t kMostDigestedBytes = std::uint64_t{1} << 20;

// An address in a device's memory, as this process sees it. For a double it is a plain pointer.
using DeviceAddress = std::uint64_t;

// `rows` runs of `run_bytes`. The strides are in bytes and matter for more than one row.
struct Upload {
  // Host memory. Pinned memory is read at full speed.
  const std::byte* from = nullptr;
  DeviceAddress to = 0;
  std::uint64_t run_bytes = 0;
  std::uint64_t rows = 1;
  std::uint64_t from_stride = 0;
  std::uint64_t to_stride = 0;
};
// Inside the device.
struct Move {
  DeviceAddress from = 0;
  DeviceAddress to = 0;
  std::uint64_t bytes = 0;
};
// From the device to host memory. `bytes` counts for each row.
struct Download {
  DeviceAddress from = 0;
  std::byte* to = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t rows = 1;
  std::uint64_t from_stride = 0;
  std::uint64_t to_stride = 0;
};

// Lets another process of this host open memory or an event. Only for that process; never logged.
struct Handle {
  std::string bytes;
  // Only doubles use it.
  UniqueFd fd;
};

class Memory {
 public:
  // Frees or unmaps the memory. No queued work may use it.
  virtual ~Memory() = default;
  virtual DeviceAddress address() const = 0;
  virtual std::uint64_t bytes() const = 0;
};
// How a process maps a block.
enum class Access {
  // Work that writes to the block is an error of the caller, and can end the process.
  kRead,
  kWrite,
};
// Memory that can outlive this process: docs/internals/resident.md.
class Block : public Memory {
 public:
  // Keeps the memory. Whoever has the descriptor can open the block for writing.
  virtual Result<UniqueFd> export_descriptor() = 0;
  // How this process maps it.
  virtual Access access() const = 0;
  // At the same address. No queued work may use the block.
  virtual Result<void> set_access(Access access) = 0;
};
class Event {
 public:
  virtual ~Event() = default;
};
// Host memory that the device reads directly.
class Pin {
 public:
  // No queued work may use the memory.
  virtual ~Pin() = default;
};

// The results of Stream::digest(), in host memory.
class Digests {
 public:
  // No queued work may use it.
  virtual ~Digests() = default;
  virtual std::size_t capacity() const = 0;
  // The digests of the last batch, in the order of its boxes, after the device has done it.
  virtual std::span<const Digest> values() const = 0;
};

// Work that runs in order. Calls queue work and return. If the device fails, a later call and all
// calls after it return kInternal. One thread at a time.
class Stream {
 public:
  // Waits for the queued work, unless the stream is borrowed.
  virtual ~Stream() = default;
  virtual Result<void> upload(std::span<const Upload> copies) = 0;
  virtual Result<void> move(std::span<const Move> copies) = 0;
  virtual Result<void> download(std::span<const Download> copies) = 0;
  // Computes the BLAKE3 of boxes in this device's memory. Each box has 1 to kMostDigestedBytes
  // bytes, and there are at most into.capacity() boxes. The last batch in `into` must be done.
  virtual Result<void> digest(std::span<const BoxBytes> boxes, Digests& into) = 0;
  virtual Result<void> record(Event& event) = 0;
  // Later work of this stream starts after the work before the last record of `event`, as of this
  // call. An event that was never recorded blocks nothing.
  virtual Result<void> wait(Event& event) = 0;
  // Waits until the queue is empty. kTimeout: it is not; the work stays queued.
  virtual Result<void> finish(TimePoint deadline) = 0;
};

struct DeviceMemory {
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
};

// Thread-safe. It lives longer than all objects that it makes.
class Device {
 public:
  virtual ~Device() = default;
  // "GPU-6f2c…" or "double:0", the same in all processes.
  virtual const std::string& id() const = 0;
  // "NVIDIA H200".
  virtual const std::string& name() const = 0;
  virtual Result<DeviceMemory> memory() const = 0;
  // Aligned to at least 256 bytes. kExhausted.
  virtual Result<std::unique_ptr<Memory>> allocate(std::uint64_t bytes) = 0;
  // The event may be shared with other processes. Only streams of this device wait for it.
  virtual Result<std::unique_ptr<Event>> make_event() = 0;
  // Streams of all devices of this process may wait for it.
  virtual Result<std::unique_ptr<Event>> make_local_event() = 0;
  virtual Result<std::unique_ptr<Stream>> make_stream() = 0;
  // A CUstream or cudaStream_t that the caller keeps alive. Null: the default stream.
  virtual Result<std::unique_ptr<Stream>> borrow_stream(void* stream) = 0;
  // Room for the digests of `capacity` boxes. kUnavailable: this device cannot compute digests, for
  // example because its driver lacks the compiler. kExhausted.
  virtual Result<std::unique_ptr<Digests>> make_digests(std::size_t capacity) = 0;
  // Whether the work before the last record of `event` is done. True if it was never recorded.
  virtual Result<bool> is_done(const Event& event) = 0;
  // kExhausted. kUnavailable: this kind of memory cannot be pinned; copies from it work, but
  // slower.
  virtual Result<std::unique_ptr<Pin>> pin(std::span<const std::byte> memory) = 0;

  // Handles for a process that opens them. kUnavailable: the two processes cannot share (another
  // container, a MIG slice, a driver that refuses).
  virtual Result<Handle> share(Memory& memory) = 0;
  virtual Result<Handle> share(Event& event) = 0;
  virtual Result<std::unique_ptr<Memory>> open_memory(const Handle& handle,
                                                      std::uint64_t bytes) = 0;
  virtual Result<std::unique_ptr<Event>> open_event(const Handle& handle) = 0;

  // As allocate(). `bytes` is rounded up to whole blocks of the device. kUnavailable: memory of
  // this device ends with its process.
  virtual Result<std::unique_ptr<Block>> allocate_block(std::uint64_t bytes) = 0;
  // `bytes`: the size of the whole block. kInvalid: this is no block of this device, or it has
  // another size. kUnavailable: as allocate_block().
  virtual Result<std::unique_ptr<Block>> open_block(const UniqueFd& block, std::uint64_t bytes,
                                                    Access access) = 0;

  // A dmabuf of the memory, which NICs can register. It keeps the memory alive. kUnavailable: the
  // driver makes none.
  virtual Result<UniqueFd> export_memory(Memory& /*memory*/) {
    return fail(ErrorCode::kUnavailable, "{} exports no memory to NICs", id());
  }
  // Work that is queued from now on sees the writes of NICs that have completed.
  virtual Result<void> see_nic_writes() { return {}; }

  // Lets the streams of this device write to memory of `peer`, which the same process has
  // allocated. kUnavailable: the two have no link that is much faster than the link to the host.
  virtual Result<void> reach_peer(Device& peer) {
    return fail(ErrorCode::kUnavailable, "{} has no fast link to {}", id(), peer.id());
  }
};

// One device's rank among the devices that spread bytes to each other, modelled on ncclComm_t. One
// thread at a time. After any error, call only abort() or the destructor.
class Collective {
 public:
  // Aborts.
  virtual ~Collective() = default;

  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t ranks() const = 0;
  // Queues on `stream`, in place: share i, the `share_bytes` at `at` + i * share_bytes, goes from
  // rank owners[i] to all others. Every rank queues the same calls in the same order, and settled()
  // must be true before the next one.
  virtual Result<void> spread(DeviceAddress at, std::uint64_t share_bytes,
                              std::span<const std::uint32_t> owners, Stream& stream) = 0;
  // Whether all ranks have queued the last call (to meet or to spread). It also reports later
  // failures, such as kPeerLost, so ask it while the device works, and again when it is done.
  virtual Result<bool> settled() = 0;
  // The queued work ends soon, and may leave any bytes.
  virtual void abort() = 0;
};

// Makes collectives. Thread-safe; lives longer than they do.
class Collectives {
 public:
  virtual ~Collectives() = default;
  // One rank makes the id; all ranks meet by it.
  virtual Result<std::string> make_id() = 0;
  // Begins to meet the other ranks; settled() is true when all have met. The device lives longer.
  virtual Result<std::unique_ptr<Collective>> meet(Device& device, std::uint32_t rank,
                                                   std::uint32_t ranks, std::string_view id) = 0;
};

}  // namespace rekindle::bucket
