#pragma once

#include <cstdint>

// Counts what this program allocates with operator new. A program that lists allocation_meter.cc
// among its sources has every allocation counted; the array and nothrow forms, too.
namespace rekindle::testing::allocations {

// Bytes that are allocated now, by all threads.
std::int64_t live_bytes();
// The most that live_bytes() has been since the last reset_peak().
std::int64_t peak_bytes();
void reset_peak();

// Allocations by the calling thread, without those made while an Uncounted lived on it.
std::uint64_t by_this_thread();
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

}  // namespace rekindle::testing::allocations
