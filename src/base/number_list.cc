#include "src/base/number_list.h"

#include <charconv>
#include <system_error>

namespace rekindle {

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
