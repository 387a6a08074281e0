#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace rekindle {

// The first bytes of a text, at most `most`. They end between two characters of UTF-8, because
// protobuf does not parse a string with half of one.
constexpr std::string_view cut_text(std::string_view text, std::size_t most) {
  std::size_t size = std::min(text.size(), most);
  const auto is_inside = [&] {
    return size < text.size() && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80;
  };
  while (size > 0 && is_inside()) --size;
  return text.substr(0, size);
}

}  // namespace rekindle
