#pragma once

#include <cstdint>

#include "src/base/clock.h"

namespace rekindle::bucket {

// How many bytes may go beside other work: so many a second, from a beginning on. What was not used
// is not lost. Pure.
class Allowance {
 public:
  Allowance(std::uint64_t bytes_per_second, TimePoint begin)
      : bytes_per_second_(bytes_per_second), begin_(begin) {}

  // False: too many by now, nothing was taken.
  bool take(std::uint64_t bytes, TimePoint now);
  std::uint64_t taken() const { return taken_; }

 private:
  const std::uint64_t bytes_per_second_;
  const TimePoint begin_;
  std::uint64_t taken_ = 0;
};

}  // namespace rekindle::bucket
