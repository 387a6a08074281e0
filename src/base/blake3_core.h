#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

// The compression function of BLAKE3 ("BLAKE3: one function, fast everywhere", sections 2.1 to
// 2.3), written once for every machine: a Word is one 32-bit word (portable C++ and CUDA) or a
// vector that holds the same word of several inputs (SIMD). A Word has +, ^ and rotate_right<N>().
// Everything here is inlined, because each user compiles it with instructions of its own.
#if defined(__CUDACC__)
#define REKINDLE_BLAKE3_INLINE __host__ __device__ __forceinline__
#else
#define REKINDLE_BLAKE3_INLINE inline __attribute__((always_inline))
#endif

namespace rekindle {

// The bytes of a tile where they lie in memory: `planes` planes of `rows` runs of `run_bytes`,
// taken in that order. Strides are in bytes, from start to start, and matter only where their count
// is above 1. A box with more strided dimensions has to be gathered first. The memory is of a GPU
// or of the host, and the struct lies in the GPU's memory as it is here.
struct BoxBytes {
  std::uint64_t address = 0;
  std::uint32_t run_bytes = 0;
  std::uint32_t rows = 1;    // at least 1
  std::uint32_t planes = 1;  // at least 1
  std::uint32_t unused = 0;
  std::uint64_t row_stride = 0;
  std::uint64_t plane_stride = 0;
};
static_assert(sizeof(BoxBytes) == 40);

namespace blake3_detail {

inline constexpr std::size_t kBlockBytes = 64;
inline constexpr std::size_t kChunkBytes = 1024;
inline constexpr std::size_t kChunkBlocks = kChunkBytes / kBlockBytes;
// A chaining value, or a digest: 8 words.
inline constexpr std::size_t kValueBytes = 32;

// The flags of a compression say what is compressed.
inline constexpr std::uint32_t kChunkStart = 1;
inline constexpr std::uint32_t kChunkEnd = 2;
inline constexpr std::uint32_t kParent = 4;
inline constexpr std::uint32_t kRoot = 8;
inline constexpr std::uint32_t kDeriveKeyContext = 32;
inline constexpr std::uint32_t kDeriveKeyMaterial = 64;

// The initial value: the key of the hash mode.
template <int At>
inline constexpr std::uint32_t kInitial = 0;
template <>
inline constexpr std::uint32_t kInitial<0> = 0x6A09E667;
template <>
inline constexpr std::uint32_t kInitial<1> = 0xBB67AE85;
template <>
inline constexpr std::uint32_t kInitial<2> = 0x3C6EF372;
template <>
inline constexpr std::uint32_t kInitial<3> = 0xA54FF53A;
template <>
inline constexpr std::uint32_t kInitial<4> = 0x510E527F;
template <>
inline constexpr std::uint32_t kInitial<5> = 0x9B05688C;
template <>
inline constexpr std::uint32_t kInitial<6> = 0x1F83D9AB;
template <>
inline constexpr std::uint32_t kInitial<7> = 0x5BE0CD19;

// The word of the message that stands at place `at` of round `round`: the message is permuted
// between two rounds.
constexpr int message_word(int round, int at) {
  constexpr int kPermutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
  for (; round > 0; --round) at = kPermutation[at];
  return at;
}
template <int Round, int At>
inline constexpr int kMessageWord = message_word(Round, At);

template <int Bits>
REKINDLE_BLAKE3_INLINE std::uint32_t rotate_right(std::uint32_t word) {
  return word >> Bits | word << (32 - Bits);
}

// Quarter rounds ("G" in the paper) of the 4 x 4 matrix `state`: of those of its columns (Diagonal
// 0) or diagonals (1) that At names. They take each step together, because the steps of one depend
// on each other and a CPU looks only some dozens of instructions ahead.
template <int Round, int Diagonal, typename Word, int... At>
REKINDLE_BLAKE3_INLINE void mix(Word (&state)[16], const Word (&message)[16],
                                std::integer_sequence<int, At...>) {
  constexpr int kFirst = 8 * Diagonal;
  Word* const a = state;
  Word* const b = state + 4;
  Word* const c = state + 8;
  Word* const d = state + 12;
  ((a[At] = a[At] + message[kMessageWord<Round, kFirst + 2 * At>]), ...);
  ((a[At] = a[At] + b[(At + Diagonal) % 4]), ...);
  ((d[(At + 3 * Diagonal) % 4] = d[(At + 3 * Diagonal) % 4] ^ a[At]), ...);
  ((d[(At + 3 * Diagonal) % 4] = rotate_right<16>(d[(At + 3 * Diagonal) % 4])), ...);
  ((c[(At + 2 * Diagonal) % 4] = c[(At + 2 * Diagonal) % 4] + d[(At + 3 * Diagonal) % 4]), ...);
  ((b[(At + Diagonal) % 4] = b[(At + Diagonal) % 4] ^ c[(At + 2 * Diagonal) % 4]), ...);
  ((b[(At + Diagonal) % 4] = rotate_right<12>(b[(At + Diagonal) % 4])), ...);
  ((a[At] = a[At] + message[kMessageWord<Round, kFirst + 2 * At + 1>]), ...);
  ((a[At] = a[At] + b[(At + Diagonal) % 4]), ...);
  ((d[(At + 3 * Diagonal) % 4] = d[(At + 3 * Diagonal) % 4] ^ a[At]), ...);
  ((d[(At + 3 * Diagonal) % 4] = rotate_right<8>(d[(At + 3 * Diagonal) % 4])), ...);
  ((c[(At + 2 * Diagonal) % 4] = c[(At + 2 * Diagonal) % 4] + d[(At + 3 * Diagonal) % 4]), ...);
  ((b[(At + Diagonal) % 4] = b[(At + Diagonal) % 4] ^ c[(At + 2 * Diagonal) % 4]), ...);
  ((b[(At + Diagonal) % 4] = rotate_right<7>(b[(At + Diagonal) % 4])), ...);
}

// `Together`: 4 where the state, the message and what is between them fit into the registers (32 of
// them), 2 elsewhere.
template <int Round, int Together, typename Word>
REKINDLE_BLAKE3_INLINE void mix_round(Word (&state)[16], const Word (&message)[16]) {
  if constexpr (Together == 4) {
    mix<Round, 0>(state, message, std::integer_sequence<int, 0, 1, 2, 3>{});
    mix<Round, 1>(state, message, std::integer_sequence<int, 0, 1, 2, 3>{});
  } else {
    mix<Round, 0>(state, message, std::integer_sequence<int, 0, 1>{});
    mix<Round, 0>(state, message, std::integer_sequence<int, 2, 3>{});
    mix<Round, 1>(state, message, std::integer_sequence<int, 0, 1>{});
    mix<Round, 1>(state, message, std::integer_sequence<int, 2, 3>{});
  }
}

// Compresses one block of `block_bytes` bytes (the rest of `message` is zero) into `value`, the
// chaining value.
template <int Together, typename Word>
REKINDLE_BLAKE3_INLINE void compress(Word (&value)[8], const Word (&message)[16],
                                     const Word& counter_low, const Word& counter_high,
                                     const Word& block_bytes, const Word& flags) {
  Word state[16] = {value[0],          value[1],          value[2],          value[3],
                    value[4],          value[5],          value[6],          value[7],
                    Word(kInitial<0>), Word(kInitial<1>), Word(kInitial<2>), Word(kInitial<3>),
                    counter_low,       counter_high,      block_bytes,       flags};
  mix_round<0, Together>(state, message);
  mix_round<1, Together>(state, message);
  mix_round<2, Together>(state, message);
  mix_round<3, Together>(state, message);
  mix_round<4, Together>(state, message);
  mix_round<5, Together>(state, message);
  mix_round<6, Together>(state, message);
  value[0] = state[0] ^ state[8];
  value[1] = state[1] ^ state[9];
  value[2] = state[2] ^ state[10];
  value[3] = state[3] ^ state[11];
  value[4] = state[4] ^ state[12];
  value[5] = state[5] ^ state[13];
  value[6] = state[6] ^ state[14];
  value[7] = state[7] ^ state[15];
}

// BLAKE3 at one SIMD level: many inputs side by side, one in each lane of the vectors. There is one
// table for each compilation of blake3_level.cc.
struct Level {
  const char* name;
  // Writes the chaining values (32 bytes each) of `count` whole chunks, which lie one after the
  // other at `data`. `key` is 8 words; `counter` is the index of the first chunk in its input.
  void (*chunks)(const std::byte* data, std::size_t count, const std::uint32_t* key,
                 std::uint64_t counter, std::uint32_t flags, std::byte* values);
  // Writes the values of `count` parents of 2 * `count` children. `parents` may be `children`.
  void (*parents)(const std::byte* children, std::size_t count, const std::uint32_t* key,
                  std::uint32_t flags, std::byte* parents);
};

// What this CPU can run, the slowest first. blake3() uses the last one.
std::span<const Level* const> supported_levels();

}  // namespace blake3_detail
}  // namespace rekindle
