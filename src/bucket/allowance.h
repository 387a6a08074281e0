#pragma once

#include <cstdint>

#include "src/base/clock.h"

namespace rekindle::bucket {

// Limits the bytes of background work: so many per second, from a beginning. Unused bytes are not
// lost. Pure.
class Allowance {
 public:
  Allowance(std::uint64_t bytes_per_second, TimePoint begin)
      : bytes_per_second_(bytes_per_second), begin_(begin) {}

  // False: they are too many so far, and none were taken.
  bool take(std::uint64_t bytes, TimePoint now);
  std::uint64_t taken() const { return taken_; }

 private:
  const std::uint64_t bytes_per_second_;
  const TimePoint begin_;
  std::uint64_t taken_ = 0;
};

}  // namespace rekindle::bucket
