#include "src/bucket/allowance.h"

#include <chrono>

namespace rekindle::bucket {

bool Allowance::take(std::uint64_t bytes, TimePoint now) {
  if (bytes_per_second_ == 0 || now < begin_) return false;
  const double elapsed = std::chrono::duration<double>(now - begin_).count();
  const double allowed = elapsed * static_cast<double>(bytes_per_second_);
  if (static_cast<double>(taken_) + static_cast<double>(bytes) > allowed) return false;
  taken_ += bytes;
  return true;
}

}  // namespace rekindle::bucket
