#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"

namespace rekindle {

inline constexpr std::uint64_t kKiB = 1024;
inline constexpr std::uint64_t kMiB = 1024 * kKiB;
inline constexpr std::uint64_t kGiB = 1024 * kMiB;
inline constexpr std::uint64_t kPageBytes = 4096;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// True when [offset, offset + size) lies in [0, limit); never overflows.
constexpr bool in_range(std::uint64_t offset, std::uint64_t size, std::uint64_t limit) {
  return offset <= limit && size <= limit - offset;
}

// "1.5 GiB", "17 B".
std::string format_bytes(std::uint64_t bytes);
// "3.21 GB/s" (decimal, as NICs are sold).
std::string format_rate(double bytes_per_second);
// "64M", "1.5G", "4096", "16MiB", "2GB" (M and MiB are binary, MB decimal).
Result<std::uint64_t> parse_bytes(std::string_view text);

// "0-3,8", as sysfs lists CPUs and NUMA nodes, in the order of the text. Empty: the text is not
// such a list, or a number is `limit` or more.
std::vector<int> parse_number_list(std::string_view text, int limit);

}  // namespace rekindle
