#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "src/base/result.h"

namespace rekindle {

// A BLAKE3-256 digest: it names a tile's content, a tensor set, a layout or a checkpoint.
struct Digest {
  std::array<std::uint8_t, 32> bytes{};

  std::string hex() const;  // 64 characters
  static Result<Digest> from_hex(std::string_view text);
  // From wire bytes. Anything but 32 bytes becomes the nil digest, which names nothing.
  static Digest from_bytes(std::string_view raw);
  std::string to_bytes() const { return {bytes.begin(), bytes.end()}; }
  bool is_nil() const { return *this == Digest{}; }
  auto operator<=>(const Digest&) const = default;
};

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace rekindle

template <>
struct std::hash<rekindle::Digest> {
  std::size_t operator()(const rekindle::Digest& digest) const noexcept {
    std::size_t value;
    std::memcpy(&value, digest.bytes.data(), sizeof value);
    return value;
  }
};
