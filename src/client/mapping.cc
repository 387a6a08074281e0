#include "src/client/mapping.h"

#include <cerrno>
#include <limits>
#include <utility>

#include <sys/mman.h>
#include <sys/stat.h>

namespace rekindle::client {

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Result<Mapping> Mapping::of_file(int fd, std::uint64_t bytes, bool writable) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail_errno(errno, "stat a segment");
  if (!S_ISREG(info.st_mode) || info.st_size < 0 ||
      static_cast<std::uint64_t>(info.st_size) < bytes) {
    return fail(ErrorCode::kInternal, "a segment of {} bytes came as a file of {}", bytes,
                info.st_size);
  }
  if (bytes == 0) return Mapping();
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return fail_errno(errno, fmt::format("map a segment of {} bytes", bytes));
  return Mapping(data, bytes);
}

Result<Mapping> Mapping::anonymous(std::uint64_t bytes) {
  if (bytes == 0) return Mapping();
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return fail_errno(errno, fmt::format("map {} bytes of memory", bytes));
  return Mapping(data, bytes);
}

Result<std::vector<Mapping>> map_segments(std::span<const UniqueFd> descriptors,
                                          std::span<const std::uint64_t> bytes, bool writable) {
  if (descriptors.size() != bytes.size()) {
    return fail(ErrorCode::kInternal, "the agent sent {} descriptors for {} segments",
                descriptors.size(), bytes.size());
  }
  std::vector<Mapping> segments;
  segments.reserve(bytes.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    TRY(Mapping mapping, Mapping::of_file(descriptors[i].get(), bytes[i], writable));
    segments.push_back(std::move(mapping));
  }
  return segments;
}

}  // namespace rekindle::client
