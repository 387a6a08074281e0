#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "src/base/memory_life.h"

namespace rekindle::store {

// The addresses at which a segment file is mapped. They outlive a MappedSegment as long as the pool
// keeps the file, and the next MappedSegment of the file gets the same ones. What a NIC has
// registered for these addresses therefore stays right. One MappedSegment at a time has them.
class FileMemory {
 public:
  // Takes over the mapping of a MappedSegment. `data` is null if `size_bytes` is 0.
  FileMemory(std::byte* data, std::uint64_t size_bytes)
      : data_(data), size_bytes_(size_bytes), life_(std::make_unique<MemoryLife>()) {}
  // Ends the life, then unmaps.
  ~FileMemory();
  FileMemory(const FileMemory&) = delete;
  FileMemory& operator=(const FileMemory&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t size_bytes() const { return size_bytes_; }
  MemoryLife& life() const { return *life_; }
  // For the next MappedSegment, which then maps the file here. False: another one still has the
  // addresses.
  bool occupy() { return !occupied_.exchange(true); }
  // The MappedSegment goes: takes the file away and keeps the addresses, so that no pages and no
  // right to write remain.
  void vacate();

 private:
  std::byte* const data_;
  const std::uint64_t size_bytes_;
  std::atomic<bool> occupied_ = true;
  std::unique_ptr<MemoryLife> life_;
};

}  // namespace rekindle::store
