#include "tools/bench/bench_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "src/base/blake3.h"
#include "src/base/units.h"

namespace rekindle::bench {

Result<Pool> Pool::create(std::uint64_t size) {
  UniqueFd fd(::memfd_create("rekindle-bench", MFD_CLOEXEC));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    return fail_errno(errno, "make a memory file");
  }
  void* address =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  if (address == MAP_FAILED) {
    return fail_errno(errno, fmt::format("map {}", format_bytes(size)));
  }
  return Pool(std::move(fd), {static_cast<std::byte*>(address), static_cast<std::size_t>(size)});
}

Pool::Pool(Pool&& other) noexcept
    : fd_(std::move(other.fd_)), bytes_(std::exchange(other.bytes_, {})) {}

Pool::~Pool() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

Result<void> Pool::free_pages() const {
  if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  static_cast<off_t>(bytes_.size())) != 0) {
    return fail_errno(errno, "free the pages of a memory file");
  }
  return {};
}

Result<void> read_file(const std::string& path, std::span<std::byte> bytes) {
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    return fail(ErrorCode::kInvalid, "bench: read {} of '{}': no such file, or another size",
                format_bytes(bytes.size()), path);
  }
  return {};
}

Result<void> write_file(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) {
    return fail(ErrorCode::kUnavailable, "bench: write {} to '{}' failed",
                format_bytes(bytes.size()), path);
  }
  return {};
}

void fill_with_noise(std::span<std::byte> bytes) {
  std::uint64_t state = 0x9e3779b97f4a7c15;
  for (std::size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(bytes.data() + at, &state, sizeof state);
  }
}

namespace {

Digest digest_tile(std::span<const std::byte> bytes, std::uint64_t at, std::uint64_t end) {
  return blake3(bytes.subspan(at, std::min(kTileBytes, end - at)));
}

}  // namespace

std::vector<Digest> digest_tiles(std::span<const std::byte> bytes, std::uint64_t slice_bytes) {
  std::vector<Digest> digests;
  for (std::uint64_t slice = 0; slice < bytes.size(); slice += slice_bytes) {
    const std::uint64_t end = slice + slice_bytes;
    for (std::uint64_t at = slice; at < end; at += kTileBytes) {
      digests.push_back(digest_tile(bytes, at, end));
    }
  }
  return digests;
}

bool verify_slice(std::span<const std::byte> bytes, std::uint64_t offset, std::uint64_t slice_bytes,
                  std::span<const Digest> digests) {
  const std::uint64_t tiles_per_slice = (slice_bytes + kTileBytes - 1) / kTileBytes;
  std::size_t tile = offset / slice_bytes * tiles_per_slice;
  const std::uint64_t end = offset + slice_bytes;
  for (std::uint64_t at = offset; at < end; at += kTileBytes) {
    if (digest_tile(bytes, at, end) != digests[tile++]) return false;
  }
  return true;
}

Result<std::unique_ptr<FreshMemory>> FreshMemory::create(std::uint64_t bytes, bool huge) {
  UniqueFd fd(::memfd_create("rekindle-bench", MFD_CLOEXEC | (huge ? MFD_HUGETLB : 0U)));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return fail_errno(errno, "bench: memory file");
  }
  void* const address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) {
    return fail(ErrorCode::kExhausted, "bench: map {}{}: {}", format_bytes(bytes),
                huge ? " of huge pages (sysctl vm.nr_hugepages)" : "", std::strerror(errno));
  }
  return std::unique_ptr<FreshMemory>(
      new FreshMemory(std::move(fd), {static_cast<std::byte*>(address), bytes}));
}

FreshMemory::~FreshMemory() { ::munmap(bytes_.data(), bytes_.size()); }

void touch_pages(std::span<std::byte> bytes) {
  const std::size_t count = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
  std::vector<std::thread> threads;
  const std::size_t share = round_up(bytes.size() / count + 1, kPageBytes);
  for (std::size_t at = 0; at < bytes.size(); at += share) {
    threads.emplace_back([part = bytes.subspan(at, std::min(share, bytes.size() - at))] {
      for (std::size_t page = 0; page < part.size(); page += kPageBytes) {
        *static_cast<volatile std::byte*>(&part[page]) = std::byte{1};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace rekindle::bench
