#include "src/tensor/canonical.h"

#include <algorithm>
#include <cctype>

#include <nlohmann/json.hpp>

namespace rekindle::canonical {

void Reader::dims(std::size_t rank, Dims& out) {
  if (rank > kMaxRank) {
    ok_ = false;
    return;
  }
  out = Dims::zeros(rank);
  for (std::size_t i = 0; i < rank; ++i) out[i] = u64();
}

bool is_utf8(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  for (std::size_t i = 0; i < text.size();) {
    // Nearly every name is ASCII: eight bytes at a time.
    std::uint64_t eight = 0;
    if (text.size() - i >= sizeof eight) {
      std::memcpy(&eight, text.data() + i, sizeof eight);
      if ((eight & 0x8080808080808080u) == 0) {
        i += sizeof eight;
        continue;
      }
    }
    const std::uint8_t first = byte(i);
    if (first < 0x80) {
      ++i;
      continue;
    }
    std::size_t size = 0;
    std::uint32_t code = 0;
    if (first >= 0xC2 && first <= 0xDF) {
      size = 2;
      code = first & 0x1Fu;
    } else if ((first & 0xF0) == 0xE0) {
      size = 3;
      code = first & 0x0Fu;
    } else if (first >= 0xF0 && first <= 0xF4) {
      size = 4;
      code = first & 0x07u;
    } else {
      return false;
    }
    if (size > text.size() - i) return false;
    for (std::size_t k = 1; k < size; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80) return false;
      code = code << 6 | (byte(i + k) & 0x3Fu);
    }
    const bool overlong = (size == 3 && code < 0x800) || (size == 4 && code < 0x10000);
    if (overlong || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return false;
    i += size;
  }
  return true;
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMaxBytes = 80;
  std::string result;
  for (const char c : text.substr(0, kMaxBytes)) {
    const auto byte = static_cast<std::uint8_t>(c);
    result += byte < 0x20 || byte == 0x7F ? '?' : c;
  }
  // A cut may have split a character.
  while (!result.empty() && !is_utf8(result)) result.pop_back();
  if (text.size() > kMaxBytes) result += "…";
  return result;
}

std::string folded_name(std::string_view name) {
  std::string folded(name);
  std::ranges::transform(folded, folded.begin(), [](unsigned char c) { return std::tolower(c); });
  return folded;
}

std::string json_string(std::string_view utf8) {
  const bool plain = std::all_of(utf8.begin(), utf8.end(), [](char c) {
    return c >= 0x20 && c < 0x7F && c != '"' && c != '\\';
  });
  if (plain) {  // nearly every name; ten times as fast
    std::string quoted;
    quoted.reserve(utf8.size() + 2);
    return quoted.append(1, '"').append(utf8).append(1, '"');
  }
  return nlohmann::json(utf8).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace rekindle::canonical
