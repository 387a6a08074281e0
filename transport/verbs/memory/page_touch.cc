#include "transport/verbs/memory/page_touch.h"

#include <cerrno>

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "src/base/units.h"
#include "src/store/fault_guard.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace rekindle::transport::verbs {
namespace {

// Whole pages around the memory.
std::span<std::byte> pages_of(std::span<const std::byte> memory) {
  const auto lead = reinterpret_cast<std::uintptr_t>(memory.data()) % kPageBytes;
  auto* const begin = const_cast<std::byte*>(memory.data()) - lead;  // NOLINT: for madvise
  return {begin, round_up(memory.size() + lead, kPageBytes)};
}

// The kernel checks the advice before the empty range.
bool kernel_populates() {
  static const bool knows = ::madvise(nullptr, 0, MADV_POPULATE_READ) == 0;
  return knows;
}

}  // namespace

int touch_pages(std::span<const std::byte> memory, TouchMode mode) {
  if (memory.empty()) return 0;
  if (!kernel_populates()) return touch_pages_one_by_one(memory, mode);
  const std::span<std::byte> pages = pages_of(memory);
  const int advice = mode == TouchMode::kWrite ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  constexpr int kTries = 100;  // EAGAIN and EINTR are passing
  for (int i = 0; i < kTries; ++i) {
    if (::madvise(pages.data(), pages.size(), advice) == 0) return 0;
    if (errno == ENOMEM || errno == EFAULT) return errno;
    if (errno == EHWPOISON) return EFAULT;
    if (errno != EAGAIN && errno != EINTR) break;
  }
  // This kind of memory cannot be faulted in like this. The device decides.
  return 0;
}

int touch_pages_one_by_one(std::span<const std::byte> memory, TouchMode mode) {
  if (memory.empty()) return 0;
  const std::span<std::byte> pages = pages_of(memory);
  const auto fault = store::find_mapping_fault([&] {
    for (std::size_t at = 0; at < pages.size(); at += kPageBytes) {
      auto* const byte = reinterpret_cast<volatile unsigned char*>(&pages[at]);
      unsigned char value = *byte;
      if (mode == TouchMode::kWrite) {
        // Others may be writing here. Only an atomic operation changes nothing. (clang makes a load
        // of a fetch_or(0), which is one, too.)
        (void)__atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED);
      }
    }
  });
  return fault && *fault == nullptr ? 0 : EFAULT;
}

void advise_huge_pages(std::span<const std::byte> memory, int fd) {
  if (memory.empty()) return;
  if (fd >= 0) {
    struct statfs file_system {};
    if (::fstatfs(fd, &file_system) != 0 || file_system.f_type != TMPFS_MAGIC) return;
  }
  const std::span<std::byte> pages = pages_of(memory);
  (void)::madvise(pages.data(), pages.size(), MADV_HUGEPAGE);  // advice: hugetlb refuses it
}

}  // namespace rekindle::transport::verbs
