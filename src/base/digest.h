#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "src/base/result.h"

// XXH3 (https://xxhash.com, BSD-2), compiled in for each SIMD level and chosen once at start: the
// distribution's shared library is built without AVX2 and runs at a third of the speed.
namespace rekindle {

struct Digest128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  std::string hex() const;  // 32 characters, high first
  static Result<Digest128> from_hex(std::string_view text);
  bool is_nil() const { return low == 0 && high == 0; }
  auto operator<=>(const Digest128&) const = default;
};

std::uint64_t xxh3_64(std::span<const std::byte> bytes, std::uint64_t seed);
Digest128 xxh3_128(std::span<const std::byte> bytes, std::uint64_t seed = 0);

// Streaming XXH3-64 for bytes that lie in pieces: the result equals xxh3_64 of them joined.
class Hasher64 {
 public:
  explicit Hasher64(std::uint64_t seed);
  ~Hasher64();
  Hasher64(const Hasher64&) = delete;
  Hasher64& operator=(const Hasher64&) = delete;

  void reset(std::uint64_t seed);
  void update(std::span<const std::byte> bytes);
  std::uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// "avx512", "avx2" or "sse2": what xxh3_64 uses on this CPU.
std::string_view digest_simd_level();

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace rekindle

template <>
struct std::hash<rekindle::Digest128> {
  std::size_t operator()(const rekindle::Digest128& digest) const noexcept { return digest.low; }
};
