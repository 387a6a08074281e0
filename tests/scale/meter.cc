#include "tests/scale/meter.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <numeric>

#include <time.h>

namespace rekindle::scale {

namespace {

// One thread: the simulation has no others.
bool counting = false;
std::size_t counted_bytes = 0;

struct alignas(std::max_align_t) Header {
  std::size_t bytes;  // 0: not counted
};

std::int64_t thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

}  // namespace

void* allocate(std::size_t size) {
  auto* header = static_cast<Header*>(std::malloc(sizeof(Header) + size));
  if (header == nullptr) throw std::bad_alloc();
  header->bytes = counting ? sizeof(Header) + size : 0;
  if (counting) counted_bytes += header->bytes;
  return header + 1;
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  Header* header = static_cast<Header*>(memory) - 1;
  counted_bytes -= header->bytes;
  std::free(header);
}

Meter::Scope::Scope(Meter& meter, Duration virtual_time)
    : meter_(meter),
      second_(static_cast<std::size_t>(std::max(0.0, seconds(virtual_time)))),
      began_ns_(thread_cpu_ns()) {
  if (meter_.cpu_ns_.size() <= second_) meter_.cpu_ns_.resize(second_ + 1);
  counting = true;
}

Meter::Scope::~Scope() {
  counting = false;
  meter_.cpu_ns_[second_] += thread_cpu_ns() - began_ns_;
  ++meter_.calls_;
  meter_.peak_bytes_ = std::max(meter_.peak_bytes_, counted_bytes);
}

double Meter::cpu_seconds() const {
  return 1e-9 *
         static_cast<double>(std::accumulate(cpu_ns_.begin(), cpu_ns_.end(), std::int64_t{}));
}

double Meter::busiest_share() const {
  const auto busiest = std::max_element(cpu_ns_.begin(), cpu_ns_.end());
  return busiest == cpu_ns_.end() ? 0 : 1e-9 * static_cast<double>(*busiest);
}

}  // namespace rekindle::scale

void* operator new(std::size_t size) { return rekindle::scale::allocate(size); }
void* operator new[](std::size_t size) { return rekindle::scale::allocate(size); }
void operator delete(void* memory) noexcept { rekindle::scale::release(memory); }
void operator delete[](void* memory) noexcept { rekindle::scale::release(memory); }
void operator delete(void* memory, std::size_t) noexcept { rekindle::scale::release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { rekindle::scale::release(memory); }
