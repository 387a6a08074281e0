#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::bench {

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
