#include "src/base/units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <system_error>

namespace rekindle {

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array<std::string_view, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : 1, kUnits[unit]);
}

std::string format_rate(double bytes_per_second) {
  if (bytes_per_second >= 1e9) return fmt::format("{:.2f} GB/s", bytes_per_second / 1e9);
  if (bytes_per_second >= 1e6) return fmt::format("{:.1f} MB/s", bytes_per_second / 1e6);
  return fmt::format("{:.0f} KB/s", bytes_per_second / 1e3);
}

Result<std::uint64_t> parse_bytes(std::string_view text) {
  struct Suffix {
    std::string_view name;
    double factor;
  };
  constexpr std::array<Suffix, 19> kSuffixes = {{{"", 1},
                                                 {"B", 1},
                                                 {"K", 0x1p10},
                                                 {"KiB", 0x1p10},
                                                 {"KB", 1e3},
                                                 {"M", 0x1p20},
                                                 {"MiB", 0x1p20},
                                                 {"MB", 1e6},
                                                 {"G", 0x1p30},
                                                 {"GiB", 0x1p30},
                                                 {"GB", 1e9},
                                                 {"T", 0x1p40},
                                                 {"TiB", 0x1p40},
                                                 {"TB", 1e12},
                                                 {"kB", 1e3},
                                                 {"k", 0x1p10},
                                                 {"m", 0x1p20},
                                                 {"g", 0x1p30},
                                                 {"t", 0x1p40}}};
  double value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view suffix(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (error == std::errc() && std::isfinite(value) && value >= 0) {
    for (const auto& [name, factor] : kSuffixes) {
      if (name == suffix && value * factor < 0x1p63) {
        return static_cast<std::uint64_t>(value * factor);
      }
    }
  }
  return fail(ErrorCode::kInvalid, "'{}' is not a size; write for example 4096, 64M, 1.5GiB or 2GB",
              text);
}

std::vector<int> parse_number_list(std::string_view text, int limit) {
  std::vector<int> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    int first = 0;
    auto read = std::from_chars(at, end, first);
    int last = first;
    if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') {
      read = std::from_chars(read.ptr + 1, end, last);
    }
    const bool good = read.ec == std::errc() && first >= 0 && first <= last && last < limit &&
                      (read.ptr == end || (*read.ptr == ',' && read.ptr + 1 != end));
    if (!good) return {};
    for (int number = first; number <= last; ++number) numbers.push_back(number);
    at = read.ptr == end ? end : read.ptr + 1;
  }
  return numbers;
}

}  // namespace rekindle
