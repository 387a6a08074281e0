#pragma once

#include <cstdint>
#include <cstring>

#include "src/base/digest.h"

namespace rekindle::test {

// A digest of nothing that carries two numbers, for tests that only compare digests. Of numbers
// below 256 it is Digest{first, second}.
inline Digest numbered_digest(std::uint64_t first, std::uint8_t second = 0) {
  Digest digest;
  digest.bytes[0] = static_cast<std::uint8_t>(first);
  digest.bytes[1] = second;
  first >>= 8;
  std::memcpy(digest.bytes.data() + 8, &first, sizeof first);
  return digest;
}
inline std::uint64_t first_number(const Digest& digest) {
  std::uint64_t first = 0;
  std::memcpy(&first, digest.bytes.data() + 8, sizeof first);
  return first << 8 | digest.bytes[0];
}

}  // namespace rekindle::test
