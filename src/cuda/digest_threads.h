#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/blake3_core.h"

// Private to src/cuda: the work of one thread of the digest kernels, for the GPU (digest_kernel.cu)
// and, in tests, for the CPU. Words are stored as they lie, because both are little-endian.
namespace rekindle::cuda {

using blake3_detail::kBlockBytes;
using blake3_detail::kChunkBytes;

// A chaining value or a digest in the GPU's memory.
struct alignas(16) DigestValue {
  std::uint32_t words[8];
};
static_assert(sizeof(DigestValue) == 32);

// 16 bytes that are loaded at once.
struct alignas(16) DigestQuad {
  std::uint32_t words[4];
};

// A tile is at most 1 MiB: all that counts inside it fits into 32 bits.
REKINDLE_BLAKE3_INLINE std::uint32_t bytes_of(const BoxBytes& box) {
  return box.run_bytes * box.rows * box.planes;
}

// Chunks of a tile of so many bytes; an empty one has a chunk, too.
REKINDLE_BLAKE3_INLINE std::uint32_t chunks_of(std::uint32_t bytes) {
  return bytes == 0 ? 1 : (bytes - 1) / std::uint32_t{kChunkBytes} + 1;
}

// Reads the bytes of a box in order.
class BoxCursor {
 public:
  // At byte `offset`, which is at most the length of the box.
  REKINDLE_BLAKE3_INLINE BoxCursor(const BoxBytes& box, std::uint32_t offset) : box_(box) {
    const std::uint32_t run = box.run_bytes == 0 ? 0 : offset / box.run_bytes;
    row_ = run % box.rows;
    plane_ = run / box.rows;
    begin_run();
    address_ += offset - run * box.run_bytes;
    left_in_run_ -= offset - run * box.run_bytes;
    // A stride that is never used may be anything.
    std::uint64_t both = box.address;
    if (box.rows > 1 || box.planes > 1) both |= box.run_bytes;
    if (box.rows > 1) both |= box.row_stride;
    if (box.planes > 1) both |= box.plane_stride;
    unit_ = both % 16 == 0 ? 16 : both % 4 == 0 ? 4 : 1;
  }

  // Loads the next `bytes` bytes, at most kBlockBytes, and zeros behind them.
  REKINDLE_BLAKE3_INLINE void load(std::uint32_t bytes, std::uint32_t (&message)[16]) {
    if (bytes == kBlockBytes && unit_ == 16) {
      if (left_in_run_ >= kBlockBytes) {
        for (std::uint32_t i = 0; i < 4; ++i) load_quad(16 * i, message + 4 * i);
        advance(std::uint32_t{kBlockBytes});
      } else {
        for (std::uint32_t i = 0; i < 4; ++i) {
          load_quad(0, message + 4 * i);
          advance(16);
        }
      }
    } else if (bytes == kBlockBytes && unit_ == 4) {
      for (std::uint32_t i = 0; i < 16; ++i) {
        message[i] = *reinterpret_cast<const std::uint32_t*>(address_);
        advance(4);
      }
    } else {
      load_bytes(bytes, message);
    }
  }

 private:
  REKINDLE_BLAKE3_INLINE void load_quad(std::uint32_t offset, std::uint32_t* words) const {
    const DigestQuad quad = *reinterpret_cast<const DigestQuad*>(address_ + offset);
    for (int i = 0; i < 4; ++i) words[i] = quad.words[i];
  }
  REKINDLE_BLAKE3_INLINE void load_bytes(std::uint32_t bytes, std::uint32_t (&message)[16]) {
    for (std::uint32_t i = 0; i < 16; ++i) {
      std::uint32_t word = 0;
#if defined(__CUDACC__)
#pragma unroll 1  // of use for short tails and odd addresses only
#endif
      for (std::uint32_t k = 0; k < 4; ++k) {
        if (4 * i + k < bytes) {
          word |= std::uint32_t{*reinterpret_cast<const std::uint8_t*>(address_)} << 8 * k;
          advance(1);
        }
      }
      message[i] = word;
    }
  }
  REKINDLE_BLAKE3_INLINE void begin_run() {
    address_ = box_.address + plane_ * box_.plane_stride + row_ * box_.row_stride;
    left_in_run_ = box_.run_bytes;
  }
  REKINDLE_BLAKE3_INLINE void advance(std::uint32_t bytes) {
    address_ += bytes;
    left_in_run_ -= bytes;
    if (left_in_run_ > 0) return;
    if (++row_ == box_.rows) {
      row_ = 0;
      ++plane_;
    }
    begin_run();
  }

  const BoxBytes& box_;
  std::uint32_t row_;
  std::uint32_t plane_;
  std::uint32_t left_in_run_;
  std::uint32_t unit_;  // bytes that may be loaded at once
  std::uint64_t address_;
};

REKINDLE_BLAKE3_INLINE void set_key(std::uint32_t (&value)[8]) {
  value[0] = blake3_detail::kInitial<0>;
  value[1] = blake3_detail::kInitial<1>;
  value[2] = blake3_detail::kInitial<2>;
  value[3] = blake3_detail::kInitial<3>;
  value[4] = blake3_detail::kInitial<4>;
  value[5] = blake3_detail::kInitial<5>;
  value[6] = blake3_detail::kInitial<6>;
  value[7] = blake3_detail::kInitial<7>;
}

// The chaining value of one chunk; of the only chunk of a box: the digest.
REKINDLE_BLAKE3_INLINE DigestValue chunk_value(const BoxBytes& box, std::uint32_t chunk) {
  const std::uint32_t bytes = bytes_of(box);
  const std::uint32_t begin = chunk * std::uint32_t{kChunkBytes};
  std::uint32_t left = bytes - begin;
  if (left > kChunkBytes) left = kChunkBytes;
  const std::uint32_t last =
      blake3_detail::kChunkEnd | (bytes <= kChunkBytes ? blake3_detail::kRoot : 0u);
  BoxCursor cursor(box, begin);
  std::uint32_t value[8];
  set_key(value);
  std::uint32_t flags = blake3_detail::kChunkStart;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (;;) {
    const std::uint32_t some = left < kBlockBytes ? left : std::uint32_t{kBlockBytes};
    left -= some;
    if (left == 0) flags |= last;
    std::uint32_t message[16];
    cursor.load(some, message);
    blake3_detail::compress<4, std::uint32_t>(value, message, chunk, 0u, some, flags);
    flags = 0;
    if (left == 0) break;
  }
  DigestValue result;
  for (int i = 0; i < 8; ++i) result.words[i] = value[i];
  return result;
}

// Node `at` of the level of the tree above the `count` values at `from`: the last of an odd count
// is carried up.
REKINDLE_BLAKE3_INLINE DigestValue parent_value(const DigestValue* from, std::uint32_t count,
                                                std::uint32_t at) {
  if (2 * at + 1 == count) return from[2 * at];
  const DigestValue left = from[2 * at];
  const DigestValue right = from[2 * at + 1];
  std::uint32_t message[16];
  for (int i = 0; i < 8; ++i) {
    message[i] = left.words[i];
    message[8 + i] = right.words[i];
  }
  std::uint32_t value[8];
  set_key(value);
  const std::uint32_t flags = blake3_detail::kParent | (count == 2 ? blake3_detail::kRoot : 0u);
  blake3_detail::compress<4, std::uint32_t>(value, message, 0u, 0u, std::uint32_t{kBlockBytes},
                                            flags);
  DigestValue result;
  for (int i = 0; i < 8; ++i) result.words[i] = value[i];
  return result;
}

}  // namespace rekindle::cuda
