#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::bench {

// A file in memory (tmpfs), mapped and faulted in.
class Pool {
 public:
  static Result<Pool> create(std::uint64_t size);
  Pool(Pool&& other) noexcept;
  Pool& operator=(Pool&&) = delete;
  ~Pool();

  std::span<std::byte> bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  // Frees the pages. The next access to each page allocates it anew, filled with zeros.
  Result<void> free_pages() const;

 private:
  Pool(UniqueFd fd, std::span<std::byte> bytes) : fd_(std::move(fd)), bytes_(bytes) {}
  UniqueFd fd_;
  std::span<std::byte> bytes_;
};

inline constexpr std::uint64_t kTileBytes = 1 << 20;

void fill_with_noise(std::span<std::byte> bytes);
// Fails unless the file has exactly as many bytes.
Result<void> read_file(const std::string& path, std::span<std::byte> bytes);
Result<void> write_file(const std::string& path, std::span<const std::byte> bytes);
// BLAKE3 of each tile; tiles do not cross the borders of slices.
std::vector<Digest> digest_tiles(std::span<const std::byte> bytes, std::uint64_t slice_bytes);
// Whether the slice at `offset` has the digests that it had there.
bool verify_slice(std::span<const std::byte> bytes, std::uint64_t offset, std::uint64_t slice_bytes,
                  std::span<const Digest> digests);

// A memory file of a size that no page is there yet, mapped for writing.
class FreshMemory {
 public:
  // `huge`: hugetlbfs pages, which the host has set aside.
  static Result<std::unique_ptr<FreshMemory>> create(std::uint64_t bytes, bool huge);
  ~FreshMemory();
  FreshMemory(const FreshMemory&) = delete;
  FreshMemory& operator=(const FreshMemory&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  FreshMemory(UniqueFd fd, std::span<std::byte> bytes) : fd_(std::move(fd)), bytes_(bytes) {}
  UniqueFd fd_;
  std::span<std::byte> bytes_;
};

// Every page once, with up to 8 threads.
void touch_pages(std::span<std::byte> bytes);

}  // namespace rekindle::bench
