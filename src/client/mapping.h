#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::client {

// Owns a mapping of memory. Movable.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Maps the first `bytes` of a file, shared. kInternal: the file is shorter.
  static Result<Mapping> of_file(int fd, std::uint64_t bytes, bool writable);
  // kExhausted: there is no memory.
  static Result<Mapping> anonymous(std::uint64_t bytes);

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }

 private:
  Mapping(void* data, std::uint64_t size) : data_(static_cast<std::byte*>(data)), size_(size) {}
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

// Maps the segments of an agent: descriptor i is segment i, of bytes[i] bytes. The mappings keep
// the memory, so the descriptors may be closed afterwards.
Result<std::vector<Mapping>> map_segments(std::span<const UniqueFd> descriptors,
                                          std::span<const std::uint64_t> bytes, bool writable);

}  // namespace rekindle::client
