#include "tools/bench/fresh_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "src/base/units.h"

namespace rekindle::bench {

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
