// BLAKE3 of many inputs at once: CMake compiles this file once per SIMD level, with that level's
// flags and names. Nothing here may leave this file except the table at its end, because the linker
// would take one level's copy of an inline function for all of them.
#include <bit>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "src/base/blake3_core.h"

#define REKINDLE_INLINE inline __attribute__((always_inline))

namespace rekindle::blake3_detail {
namespace {

static_assert(std::endian::native == std::endian::little, "vectors load words as they lie");

#if defined(__AVX512F__)
constexpr std::size_t kLanes = 16;
constexpr int kTogether = 4;
#elif defined(__AVX2__)
constexpr std::size_t kLanes = 8;
constexpr int kTogether = 2;
#else
constexpr std::size_t kLanes = 4;
constexpr int kTogether = 2;
#endif

// The same word of kLanes inputs.
struct Lanes {
  using Raw [[gnu::vector_size(4 * kLanes)]] = std::uint32_t;

  REKINDLE_INLINE Lanes() = default;
  REKINDLE_INLINE explicit Lanes(Raw lanes) : raw(lanes) {}
  REKINDLE_INLINE explicit Lanes(std::uint32_t word) : raw(Raw{} + word) {}

  static REKINDLE_INLINE Lanes load(const void* from) {
    Lanes lanes;
    std::memcpy(&lanes.raw, from, sizeof lanes.raw);
    return lanes;
  }
  REKINDLE_INLINE void store(void* to) const { std::memcpy(to, &raw, sizeof raw); }

  friend REKINDLE_INLINE Lanes operator+(const Lanes& a, const Lanes& b) {
    return Lanes(a.raw + b.raw);
  }
  friend REKINDLE_INLINE Lanes operator^(const Lanes& a, const Lanes& b) {
    return Lanes(a.raw ^ b.raw);
  }

  Raw raw;
};

template <int Bits>
REKINDLE_INLINE Lanes rotate_right(const Lanes& lanes) {
#if defined(__AVX512F__)
  return Lanes((Lanes::Raw)_mm512_ror_epi32((__m512i)lanes.raw, Bits));
#elif defined(__AVX2__)
  // Whole bytes move by one shuffle instead of two shifts and an or.
  if constexpr (Bits == 16) {
    const __m256i order = _mm256_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13,  //
                                           2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return Lanes((Lanes::Raw)_mm256_shuffle_epi8((__m256i)lanes.raw, order));
  } else if constexpr (Bits == 8) {
    const __m256i order = _mm256_setr_epi8(1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12,  //
                                           1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12);
    return Lanes((Lanes::Raw)_mm256_shuffle_epi8((__m256i)lanes.raw, order));
  } else {
    return Lanes(lanes.raw >> Bits | lanes.raw << (32 - Bits));
  }
#else
  return Lanes(lanes.raw >> Bits | lanes.raw << (32 - Bits));
#endif
}

// Turns kLanes rows of kLanes words into kLanes columns, in place.
REKINDLE_INLINE void transpose(Lanes* rows) {
#if defined(__AVX512F__)
  __m512i pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32((__m512i)rows[i].raw, (__m512i)rows[i + 1].raw);
    pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i].raw, (__m512i)rows[i + 1].raw);
  }
  // fours[4 * i + k]: words k, 4 + k, 8 + k and 12 + k of rows 4 * i to 4 * i + 3.
  __m512i fours[16];
  for (int i = 0; i < 16; i += 4) {
    fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int k = 0; k < 4; ++k) {
    const __m512i low01 = _mm512_shuffle_i32x4(fours[k], fours[4 + k], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(fours[k], fours[4 + k], 0xdd);
    const __m512i low23 = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], 0x88);
    const __m512i high23 = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], 0xdd);
    rows[k].raw = (Lanes::Raw)_mm512_shuffle_i32x4(low01, low23, 0x88);
    rows[4 + k].raw = (Lanes::Raw)_mm512_shuffle_i32x4(high01, high23, 0x88);
    rows[8 + k].raw = (Lanes::Raw)_mm512_shuffle_i32x4(low01, low23, 0xdd);
    rows[12 + k].raw = (Lanes::Raw)_mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
#elif defined(__AVX2__)
  __m256i pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32((__m256i)rows[i].raw, (__m256i)rows[i + 1].raw);
    pairs[i + 1] = _mm256_unpackhi_epi32((__m256i)rows[i].raw, (__m256i)rows[i + 1].raw);
  }
  // fours[4 * i + k]: words k and 4 + k of rows 4 * i to 4 * i + 3.
  __m256i fours[8];
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int k = 0; k < 4; ++k) {
    rows[k].raw = (Lanes::Raw)_mm256_permute2x128_si256(fours[k], fours[4 + k], 0x20);
    rows[4 + k].raw = (Lanes::Raw)_mm256_permute2x128_si256(fours[k], fours[4 + k], 0x31);
  }
#else
  const Lanes::Raw low01 = __builtin_shufflevector(rows[0].raw, rows[1].raw, 0, 4, 1, 5);
  const Lanes::Raw high01 = __builtin_shufflevector(rows[0].raw, rows[1].raw, 2, 6, 3, 7);
  const Lanes::Raw low23 = __builtin_shufflevector(rows[2].raw, rows[3].raw, 0, 4, 1, 5);
  const Lanes::Raw high23 = __builtin_shufflevector(rows[2].raw, rows[3].raw, 2, 6, 3, 7);
  rows[0].raw = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  rows[1].raw = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  rows[2].raw = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  rows[3].raw = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
#endif
}

// Loads one block of each input: word w of all of them becomes message[w].
REKINDLE_INLINE void load_message(const std::byte* const (&inputs)[kLanes], std::size_t offset,
                                  Lanes (&message)[16]) {
  constexpr std::size_t kStepBytes = 4 * kLanes;
  for (std::size_t step = 0; step < kBlockBytes / kStepBytes; ++step) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      message[step * kLanes + lane] = Lanes::load(inputs[lane] + offset + step * kStepBytes);
    }
    transpose(message + step * kLanes);
  }
}

// Stores the values of the first `count` lanes.
REKINDLE_INLINE void store_values(const Lanes (&words)[8], std::size_t count, std::byte* values) {
  alignas(64) std::byte rows[kLanes][kValueBytes];
  if constexpr (kLanes > 8) {
    // Rows are wider than a value: the upper half of each is not used.
    Lanes square[kLanes];
    for (std::size_t i = 0; i < 8; ++i) square[i] = words[i];
    for (std::size_t i = 8; i < kLanes; ++i) square[i] = Lanes(0u);
    transpose(square);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      std::memcpy(rows[lane], &square[lane].raw, kValueBytes);
    }
  } else {
    for (std::size_t part = 0; part < 8; part += kLanes) {
      Lanes square[kLanes];
      for (std::size_t i = 0; i < kLanes; ++i) square[i] = words[part + i];
      transpose(square);
      for (std::size_t lane = 0; lane < kLanes; ++lane) square[lane].store(&rows[lane][4 * part]);
    }
  }
  if (count == kLanes) {
    std::memcpy(values, rows, sizeof rows);
  } else {
    std::memcpy(values, rows, count * kValueBytes);
  }
}

// The first `count` inputs of `data`, at most kLanes. Lanes beyond them repeat the last one.
struct Inputs {
  REKINDLE_INLINE Inputs(const std::byte* data, std::size_t count, std::size_t input_bytes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      at[lane] = data + (lane < count ? lane : count - 1) * input_bytes;
    }
  }
  const std::byte* at[kLanes];
};

void chunks(const std::byte* data, std::size_t count, const std::uint32_t* key,
            std::uint64_t counter, std::uint32_t flags, std::byte* values) {
  while (count > 0) {
    const std::size_t some = count < kLanes ? count : kLanes;
    const Inputs inputs(data, some, kChunkBytes);
    // The next group is asked for while this one is computed: so many streams are too many for the
    // prefetcher of the CPU.
    const bool has_next = count >= 2 * kLanes;
    std::uint32_t low[kLanes];
    std::uint32_t high[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      low[lane] = static_cast<std::uint32_t>(counter + lane);
      high[lane] = static_cast<std::uint32_t>((counter + lane) >> 32);
    }
    Lanes words[8];
    for (std::size_t i = 0; i < 8; ++i) words[i] = Lanes(key[i]);
    for (std::size_t block = 0; block < kChunkBlocks; ++block) {
      const std::size_t offset = block * kBlockBytes;
      if (has_next) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
          __builtin_prefetch(inputs.at[lane] + offset + kLanes * kChunkBytes);
        }
      }
      Lanes message[16];
      load_message(inputs.at, offset, message);
      const std::uint32_t start = block == 0 ? kChunkStart : 0;
      const std::uint32_t end = block + 1 == kChunkBlocks ? kChunkEnd : 0;
      compress<kTogether>(words, message, Lanes::load(low), Lanes::load(high),
                          Lanes(std::uint32_t{kBlockBytes}), Lanes(flags | start | end));
    }
    store_values(words, some, values);
    data += some * kChunkBytes;
    values += some * kValueBytes;
    counter += some;
    count -= some;
  }
}

void parents(const std::byte* children, std::size_t count, const std::uint32_t* key,
             std::uint32_t flags, std::byte* values) {
  while (count > 0) {
    const std::size_t some = count < kLanes ? count : kLanes;
    const Inputs inputs(children, some, kBlockBytes);
    Lanes words[8];
    for (std::size_t i = 0; i < 8; ++i) words[i] = Lanes(key[i]);
    Lanes message[16];
    load_message(inputs.at, 0, message);
    compress<kTogether>(words, message, Lanes(0u), Lanes(0u), Lanes(std::uint32_t{kBlockBytes}),
                        Lanes(flags | kParent));
    store_values(words, some, values);
    children += some * kBlockBytes;
    values += some * kValueBytes;
    count -= some;
  }
}

}  // namespace

extern const Level REKINDLE_BLAKE3_TABLE;
const Level REKINDLE_BLAKE3_TABLE = {REKINDLE_BLAKE3_NAME, chunks, parents};

}  // namespace rekindle::blake3_detail
