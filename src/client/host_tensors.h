#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/bucket/contents.h"
#include "src/client/rekindle.h"

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

// Every piece, without data. The texts and lists belong to `contents`.
std::vector<rk_tensor> describe_pieces(const bucket::Contents& contents);
// Every tensor of the whole version, likewise.
std::vector<rk_tensor> describe_version(const bucket::Contents& contents);

// A session's tensors in host memory: in place in the agent's segments, or as copies of boxes that
// do not lie contiguously there. Both stay mapped as long as this object lives. One thread at a
// time.
class HostTensors {
 public:
  explicit HostTensors(std::vector<Mapping> segments);

  // The pieces at these indexes, with their data. kExhausted: there is no memory for a copy.
  Result<std::vector<rk_tensor>> make(const bucket::Contents& contents,
                                      std::span<const std::size_t> pieces);

 private:
  Result<rk_tensor> make_one(const bucket::Contents& contents, const bucket::Piece& piece);

  std::vector<Mapping> segments_;
  // Where each segment begins.
  std::vector<const std::byte*> data_;
  std::deque<Mapping> copies_;
};

}  // namespace rekindle::client
