#include "tests/support/allocation_meter.h"

#include <atomic>
#include <cstdlib>
#include <new>

#include <malloc.h>

namespace rekindle::testing::allocations {

namespace {

std::atomic<std::int64_t> live = 0;
std::atomic<std::int64_t> peak = 0;
thread_local std::uint64_t thread_count = 0;
thread_local int uncounted_depth = 0;

void* allocate(std::size_t size, std::size_t alignment) {
  void* const memory =
      alignment > __STDCPP_DEFAULT_NEW_ALIGNMENT__
          ? std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
          : std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  if (uncounted_depth == 0) ++thread_count;
  const auto bytes = static_cast<std::int64_t>(::malloc_usable_size(memory));
  const std::int64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::int64_t highest = peak.load(std::memory_order_relaxed);
  while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
  }
  return memory;
}

void release(void* memory) {
  if (memory == nullptr) return;
  live.fetch_sub(static_cast<std::int64_t>(::malloc_usable_size(memory)),
                 std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

std::int64_t live_bytes() { return live; }
std::int64_t peak_bytes() { return peak; }
void reset_peak() { peak = live.load(); }
std::uint64_t by_this_thread() { return thread_count; }
Uncounted::Uncounted() { ++uncounted_depth; }
Uncounted::~Uncounted() { --uncounted_depth; }

}  // namespace rekindle::testing::allocations

namespace allocations = rekindle::testing::allocations;

void* operator new(std::size_t size) { return allocations::allocate(size, 0); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocations::allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { allocations::release(memory); }
void operator delete(void* memory, std::size_t) noexcept { allocations::release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { allocations::release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  allocations::release(memory);
}
