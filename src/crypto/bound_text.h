#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace rekindle::crypto {

// The bytes that a MAC or a signature covers: a label, then fields that cannot run into each other.
// Byte strings carry their length; integers are little-endian and have a fixed size.
class BoundText {
 public:
  explicit BoundText(std::string_view label) { bytes(label); }
  BoundText& bytes(std::string_view value) {
    u64(value.size());
    text_.append(value);
    return *this;
  }
  BoundText& u64(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) text_ += static_cast<char>(value >> shift & 0xff);
    return *this;
  }
  std::string take() && { return std::move(text_); }

 private:
  std::string text_;
};

}  // namespace rekindle::crypto
