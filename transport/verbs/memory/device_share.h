#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "transport/verbs/memory/memory_registrar.h"

// One registration on one device, and the facts that registrations share about the device.
namespace rekindle::transport::verbs {

// The shared state of all registrations of one device. It outlives them.
struct DeviceShare {
  DeviceShare(const Device& of, std::uint64_t limit) : device(of), limit_bytes(limit) {}
  const Device& device;
  const std::uint64_t limit_bytes;  // 0: none
  std::atomic<std::uint64_t> bytes = 0;
  std::atomic<std::uint64_t> pieces = 0;
  std::atomic<std::uint64_t> failures = 0;
  // Learned by trying, once.
  std::atomic<bool> refuses_relaxed_ordering = false;
  std::atomic<bool> refuses_read_only = false;

  bool reserve(std::uint64_t piece_bytes);  // false: over the limit
  void give_back(std::uint64_t piece_bytes) { bytes.fetch_sub(piece_bytes); }
};

// A region's memory. When a device wants one, it also has a second, writable mapping of the same
// file, through which nobody writes. Thread-safe.
class RegionMemory {
 public:
  RegionMemory(std::span<const std::byte> bytes, int fd, std::uint64_t fd_offset)
      : bytes_(bytes), fd_(fd), fd_offset_(fd_offset) {}
  ~RegionMemory();
  RegionMemory(const RegionMemory&) = delete;
  RegionMemory& operator=(const RegionMemory&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  int fd() const { return fd_; }
  // nullptr: not possible (no file, no right to write to it).
  const std::byte* writable();
  // Where pages are faulted in: the mapping that devices got last.
  const std::byte* latest() const;
  // The file ends before the end of this range.
  bool ends_before(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  void map_writable();

  const std::span<const std::byte> bytes_;
  const int fd_;
  const std::uint64_t fd_offset_;
  std::once_flag once_;
  std::byte* mapping_ = nullptr;  // whole pages; set once
  std::size_t mapping_bytes_ = 0;
  std::atomic<const std::byte*> writable_ = nullptr;
};

struct Registration {
  MrHandle mr;
  const std::byte* address = nullptr;
  int error = 0;                     // when `mr` is null
  bool no_writable_mapping = false;  // it was wanted, and could not be had
};

// Tries the kinds of registration that the device may accept, the best one first. Blocks for as
// long as the device does.
Registration register_memory(DeviceShare& share, RegionMemory& memory, std::uint64_t offset,
                             std::uint64_t bytes, MemoryUse use);

// Whether windows can keep the pullers of served memory apart on this device.
bool serves_by_windows(const Device& device);

// Whether the device refuses a read-only mapping of a file. Tries it with a temporary file.
bool refuses_read_only(DeviceShare& share);

// --- GPU memory, by dmabuf. This has not run with a NIC that accepts it.

// Asks the device's driver with an invalid descriptor. A driver that knows the call complains about
// the descriptor (EBADF); another one complains about the call.
bool takes_dmabuf(const Device& device);

// Registers [offset, offset + bytes) of the dmabuf `fd`, which may be closed afterwards. The device
// knows it as `gpu_address`, so that offsets match the GPU's own pointer. `access` is that of
// ibv_reg_mr.
Result<MrHandle> register_gpu_range(const Device& device, int fd, std::uint64_t offset,
                                    std::uint64_t bytes, std::uint64_t gpu_address, int access);

}  // namespace rekindle::transport::verbs
