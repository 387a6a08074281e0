#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "src/base/digest.h"

// BLAKE3-256 (https://github.com/BLAKE3-team/BLAKE3-specs), our own: one source for every SIMD
// level, which is chosen once at start. Nothing here allocates, and everything is trivially
// destructible.
namespace rekindle {

struct BoxBytes;

namespace blake3_detail {

struct Level;

// The binary tree over the chunks of one input, fed from the left. Whole chunks go in; the bytes of
// the last, short one come with root().
class Tree {
 public:
  using Key = std::array<std::uint32_t, 8>;
  using Value = std::array<std::byte, 32>;

  // Chunks are taken in groups that fill the lanes of every level.
  static constexpr std::size_t kGroupBytes = std::size_t{16} << 10;

  Tree(const Level& level, const Key& key, std::uint32_t flags);
  void reset();
  // Takes whole groups from the front of `bytes` and returns the rest, fewer than kGroupBytes.
  std::span<const std::byte> take(std::span<const std::byte> bytes);
  // The digest of all that was taken, with `rest` at its end: fewer than kGroupBytes; at most
  // kTileBytes if nothing was taken.
  Value root(std::span<const std::byte> rest) const;

  // An input of at most that length is hashed at once, level by level of its tree.
  static constexpr std::size_t kTileBytes = std::size_t{1} << 20;

 private:
  // Chunks whose values are gathered before they are reduced to the root of one subtree: few values
  // at a time would leave most lanes empty.
  static constexpr std::size_t kPendingChunks = 256;
  static constexpr std::size_t kMostSubtrees = 56;  // of 2^64 bytes

  void fold();
  std::size_t hash_chunks(std::span<const std::byte> bytes, std::byte* values) const;

  const Level* level_;
  Key key_;
  std::uint32_t flags_;
  std::uint64_t chunks_ = 0;  // taken so far
  // Roots of complete subtrees, the largest and leftmost first; more input follows each.
  std::size_t subtrees_ = 0;
  std::array<Value, kMostSubtrees> stack_;
  // Values of the chunks to the right of them; folded when they are kPendingChunks and more comes.
  std::size_t pending_ = 0;
  alignas(64) std::array<Value, kPendingChunks> values_;
};

}  // namespace blake3_detail

// The digest of `bytes`, hash mode.
Digest blake3(std::span<const std::byte> bytes);

// Of a box in host memory; any length.
Digest blake3_of_box(const BoxBytes& box);

// The derive_key mode: `context` is a constant of the program that names the use, `bytes` is the
// key material.
Digest blake3_derive(std::string_view context, std::span<const std::byte> bytes);

// Streaming: the digest of everything that was given to update(), joined. It gathers 16 KiB before
// it hashes, so that many short updates are nearly as fast as a long one. It is 26 KiB large.
class Blake3 {
 public:
  Blake3();                                            // hash mode
  explicit Blake3(std::string_view derive_context);    // derive_key mode
  explicit Blake3(const blake3_detail::Level& level);  // hash mode, for tests and benchmarks

  // Forgets all bytes; the mode stays.
  void reset();
  void update(std::span<const std::byte> bytes);
  // More updates may follow.
  Digest finish() const;

 private:
  blake3_detail::Tree tree_;
  std::size_t gathered_bytes_ = 0;
  alignas(64) std::array<std::byte, blake3_detail::Tree::kGroupBytes> gathered_;
};

// "avx512", "avx2" or "portable": what blake3() uses on this CPU.
std::string_view blake3_simd_level();

// Parts of the tree, in hash mode, for proofs (src/tensor/tile_proof.h): the chaining value of the
// subtree over `bytes`, which begin with chunk `first_chunk` of the input and are not all of it.
// They are one chunk (also a short last one) or a complete subtree of BLAKE3's shape, of 1 MiB at
// most.
inline constexpr std::uint64_t kBlake3ChunkBytes = 1024;
Digest blake3_subtree(std::span<const std::byte> bytes, std::uint64_t first_chunk);
// Of the node above two subtrees. With `root`: the digest of the whole input.
Digest blake3_parent(const Digest& left, const Digest& right, bool root);

namespace blake3_detail {
// blake3() and blake3_derive() at one level, for tests and benchmarks.
Digest hash(const Level& level, std::span<const std::byte> bytes);
Digest derive(const Level& level, std::string_view context, std::span<const std::byte> bytes);
}  // namespace blake3_detail

}  // namespace rekindle
