#pragma once

#include <cstdint>
#include <optional>

#include "src/base/units.h"

// Overflow-safe checks of a strided range: what a peer asks for is not to be trusted.
namespace rekindle::transport {

struct StridedRange {
  std::uint64_t offset = 0;
  std::uint64_t run_bytes = 0;
  std::uint64_t count = 0;
  std::uint64_t stride = 0;
};

// run_bytes * count, or nothing when that overflows.
constexpr std::optional<std::uint64_t> payload_bytes(std::uint64_t run_bytes, std::uint64_t count) {
  std::uint64_t total = 0;
  if (__builtin_mul_overflow(run_bytes, count, &total)) return std::nullopt;
  return total;
}

// Whether every run lies in [0, limit).
constexpr bool fits(const StridedRange& range, std::uint64_t limit) {
  const auto total = payload_bytes(range.run_bytes, range.count);
  if (!total) return false;
  if (*total == 0) return range.offset <= limit;
  std::uint64_t last = 0;  // where the last run starts
  if (__builtin_mul_overflow(range.count - 1, range.stride, &last)) return false;
  if (__builtin_add_overflow(last, range.offset, &last)) return false;
  return in_range(last, range.run_bytes, limit);
}

// One past the last byte of a range that fits and is not empty.
constexpr std::uint64_t end_of(const StridedRange& range) {
  return range.offset + (range.count - 1) * range.stride + range.run_bytes;
}

}  // namespace rekindle::transport
