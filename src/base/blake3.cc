#include "src/base/blake3.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "src/base/blake3_core.h"

namespace rekindle {
namespace blake3_detail {

#if defined(__x86_64__)
extern const Level kAvx2;
extern const Level kAvx512;
#endif
extern const Level kPortable;

namespace {

struct Levels {
  Levels() {
    add(kPortable);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) add(kAvx2);
    if (__builtin_cpu_supports("avx512f")) add(kAvx512);
#endif
  }
  void add(const Level& level) { all[count++] = &level; }

  const Level* all[3] = {};
  std::size_t count = 0;
};

const Level& best_level() { return *supported_levels().back(); }

constexpr Tree::Key kHashKey = {kInitial<0>, kInitial<1>, kInitial<2>, kInitial<3>,
                                kInitial<4>, kInitial<5>, kInitial<6>, kInitial<7>};

// Hashes one input at a time, where there are too few inputs for vectors.
void compress_block(Tree::Key& value, const std::byte* block, std::size_t block_bytes,
                    std::uint64_t counter, std::uint32_t flags) {
  std::uint32_t message[16] = {};
  if (block_bytes > 0) std::memcpy(message, block, block_bytes);
  std::uint32_t words[8];
  std::memcpy(words, value.data(), sizeof words);
  compress<2, std::uint32_t>(words, message, static_cast<std::uint32_t>(counter),
                             static_cast<std::uint32_t>(counter >> 32),
                             static_cast<std::uint32_t>(block_bytes), flags);
  std::memcpy(value.data(), words, sizeof words);
}

// `last` is added to the flags of the last block: kRoot, or nothing.
void hash_chunk(const Tree::Key& key, std::span<const std::byte> chunk, std::uint64_t counter,
                std::uint32_t flags, std::uint32_t last, std::byte* to) {
  Tree::Key value = key;
  std::uint32_t start = kChunkStart;
  while (chunk.size() > kBlockBytes) {
    compress_block(value, chunk.data(), kBlockBytes, counter, flags | start);
    chunk = chunk.subspan(kBlockBytes);
    start = 0;
  }
  compress_block(value, chunk.data(), chunk.size(), counter, flags | start | kChunkEnd | last);
  std::memcpy(to, value.data(), kValueBytes);
}

// `children` are two values that lie one after the other. `to` may be among them.
void hash_parent(const Tree::Key& key, const std::byte* children, std::uint32_t flags,
                 std::byte* to) {
  Tree::Key value = key;
  compress_block(value, children, kBlockBytes, 0, flags | kParent);
  std::memcpy(to, value.data(), kValueBytes);
}

// Goes up the tree over `count` values, in place, until at most `most` (1 or 2) are left: how many.
// An odd one at the end of a level is carried up to the next.
std::size_t reduce(const Level& level, const Tree::Key& key, std::uint32_t flags, std::byte* values,
                   std::size_t count, std::size_t most) {
  for (; count > most; count = count / 2 + count % 2) {
    level.parents(values, count / 2, key.data(), flags, values);
    if (count % 2 == 1) {
      std::memmove(values + count / 2 * kValueBytes, values + (count - 1) * kValueBytes,
                   kValueBytes);
    }
  }
  return count;
}

Tree::Key context_key(const Level& level, std::string_view context) {
  Tree tree(level, kHashKey, kDeriveKeyContext);
  const Tree::Value value = tree.root(tree.take(as_bytes(context)));
  return std::bit_cast<Tree::Key>(value);
}

Digest to_digest(const Tree::Value& value) { return std::bit_cast<Digest>(value); }

Digest hash_tree(Tree& tree, std::span<const std::byte> bytes) {
  return to_digest(tree.root(bytes.size() <= Tree::kTileBytes ? bytes : tree.take(bytes)));
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "words are loaded as they lie");
static_assert(std::is_trivially_destructible_v<Blake3>);

std::span<const Level* const> supported_levels() {
  static const Levels levels;
  return {levels.all, levels.count};
}

Tree::Tree(const Level& level, const Key& key, std::uint32_t flags)
    : level_(&level), key_(key), flags_(flags) {}

void Tree::reset() {
  chunks_ = 0;
  subtrees_ = 0;
  pending_ = 0;
}

// Reduces the values that are pending, a whole subtree's, to its root, and merges complete subtrees
// of one size. None of them is the root of the tree, because more input follows.
void Tree::fold() {
  for (; pending_ > 1; pending_ /= 2) {
    level_->parents(values_[0].data(), pending_ / 2, key_.data(), flags_, values_[0].data());
  }
  stack_[subtrees_++] = values_[0];
  pending_ = 0;
  // One subtree is left for each bit of their number.
  const auto left = static_cast<std::size_t>(std::popcount(chunks_ / kPendingChunks));
  for (; subtrees_ > left; --subtrees_) {
    std::byte* const pair = stack_[subtrees_ - 2].data();
    hash_parent(key_, pair, flags_, pair);
  }
}

std::size_t Tree::hash_chunks(std::span<const std::byte> bytes, std::byte* values) const {
  const std::size_t whole = bytes.size() / kChunkBytes;
  level_->chunks(bytes.data(), whole, key_.data(), chunks_, flags_, values);
  const auto rest = bytes.subspan(whole * kChunkBytes);
  if (rest.empty()) return whole;
  hash_chunk(key_, rest, chunks_ + whole, flags_, 0, values + whole * kValueBytes);
  return whole + 1;
}

std::span<const std::byte> Tree::take(std::span<const std::byte> bytes) {
  while (bytes.size() >= kGroupBytes) {
    if (pending_ == kPendingChunks) fold();
    const std::size_t groups =
        std::min(bytes.size(), (kPendingChunks - pending_) * kChunkBytes) / kGroupBytes;
    const auto some = bytes.first(groups * kGroupBytes);
    const std::size_t count = hash_chunks(some, values_[pending_].data());
    pending_ += count;
    chunks_ += count;
    bytes = bytes.subspan(some.size());
  }
  return bytes;
}

Tree::Value Tree::root(std::span<const std::byte> rest) const {
  Value root;
  if (chunks_ == 0 && rest.size() <= kChunkBytes) {
    hash_chunk(key_, rest, 0, flags_, kRoot, root.data());
    return root;
  }
  if (pending_ == kPendingChunks && !rest.empty()) {
    Tree folded = *this;
    folded.fold();
    return folded.root(rest);
  }
  // Room for a child of the root to the left of the values.
  alignas(64) std::byte room[(kTileBytes / kChunkBytes + 2) * kValueBytes];
  std::byte* const values = room + 2 * kValueBytes;
  if (pending_ > 0) std::memcpy(values, values_.data(), pending_ * kValueBytes);
  std::size_t left = pending_ + hash_chunks(rest, values + pending_ * kValueBytes);
  left = reduce(*level_, key_, flags_, values, left, 2);
  if (subtrees_ == 0) {
    hash_parent(key_, values, flags_ | kRoot, root.data());
    return root;
  }
  if (left == 2) hash_parent(key_, values, flags_, values);
  // Up the right edge of the tree.
  std::byte* const pair = values - kValueBytes;
  for (std::size_t at = subtrees_; at > 0; --at) {
    std::memcpy(pair, stack_[at - 1].data(), kValueBytes);
    hash_parent(key_, pair, flags_ | (at == 1 ? kRoot : 0), values);
  }
  std::memcpy(root.data(), values, kValueBytes);
  return root;
}

Digest subtree(const Level& level, std::span<const std::byte> bytes, std::uint64_t first_chunk) {
  alignas(64) std::byte values[Tree::kTileBytes / kChunkBytes * kValueBytes];
  std::size_t left = bytes.size() / kChunkBytes;
  level.chunks(bytes.data(), left, kHashKey.data(), first_chunk, 0, values);
  if (const auto rest = bytes.subspan(left * kChunkBytes); !rest.empty() || left == 0) {
    hash_chunk(kHashKey, rest, first_chunk + left, 0, 0, values + left * kValueBytes);
    ++left;
  }
  reduce(level, kHashKey, 0, values, left, 1);
  Tree::Value value;
  std::memcpy(value.data(), values, kValueBytes);
  return to_digest(value);
}

Digest hash(const Level& level, std::span<const std::byte> bytes) {
  Tree tree(level, kHashKey, 0);
  return hash_tree(tree, bytes);
}

Digest derive(const Level& level, std::string_view context, std::span<const std::byte> bytes) {
  Tree tree(level, context_key(level, context), kDeriveKeyMaterial);
  return hash_tree(tree, bytes);
}

}  // namespace blake3_detail

Digest blake3(std::span<const std::byte> bytes) {
  return blake3_detail::hash(blake3_detail::best_level(), bytes);
}

Digest blake3_derive(std::string_view context, std::span<const std::byte> bytes) {
  return blake3_detail::derive(blake3_detail::best_level(), context, bytes);
}

Digest blake3_subtree(std::span<const std::byte> bytes, std::uint64_t first_chunk) {
  return blake3_detail::subtree(blake3_detail::best_level(), bytes, first_chunk);
}

Digest blake3_parent(const Digest& left, const Digest& right, bool root) {
  std::byte children[2 * blake3_detail::kValueBytes];
  std::memcpy(children, left.bytes.data(), blake3_detail::kValueBytes);
  std::memcpy(children + blake3_detail::kValueBytes, right.bytes.data(),
              blake3_detail::kValueBytes);
  blake3_detail::Tree::Value value;
  blake3_detail::hash_parent(blake3_detail::kHashKey, children, root ? blake3_detail::kRoot : 0,
                             value.data());
  return blake3_detail::to_digest(value);
}

Blake3::Blake3() : Blake3(blake3_detail::best_level()) {}

Blake3::Blake3(std::string_view derive_context)
    : tree_(blake3_detail::best_level(),
            blake3_detail::context_key(blake3_detail::best_level(), derive_context),
            blake3_detail::kDeriveKeyMaterial) {}

Blake3::Blake3(const blake3_detail::Level& level) : tree_(level, blake3_detail::kHashKey, 0) {}

void Blake3::reset() {
  tree_.reset();
  gathered_bytes_ = 0;
}

void Blake3::update(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (gathered_bytes_ > 0) {
    const std::size_t some = std::min(bytes.size(), gathered_.size() - gathered_bytes_);
    std::memcpy(gathered_.data() + gathered_bytes_, bytes.data(), some);
    gathered_bytes_ += some;
    bytes = bytes.subspan(some);
    if (gathered_bytes_ < gathered_.size()) return;
    tree_.take(gathered_);
    gathered_bytes_ = 0;
  }
  bytes = tree_.take(bytes);
  if (bytes.empty()) return;
  std::memcpy(gathered_.data(), bytes.data(), bytes.size());
  gathered_bytes_ = bytes.size();
}

Digest Blake3::finish() const {
  return blake3_detail::to_digest(tree_.root(std::span(gathered_).first(gathered_bytes_)));
}

std::string_view blake3_simd_level() { return blake3_detail::best_level().name; }

Digest blake3_of_box(const BoxBytes& box) {
  const auto* const base = reinterpret_cast<const std::byte*>(box.address);
  if (box.rows == 1 && box.planes == 1) return blake3({base, box.run_bytes});
  Blake3 hasher;
  for (std::uint64_t plane = 0; plane < box.planes; ++plane) {
    for (std::uint64_t row = 0; row < box.rows; ++row) {
      const std::byte* const run = base + plane * box.plane_stride + row * box.row_stride;
      hasher.update({run, box.run_bytes});
    }
  }
  return hasher.finish();
}

}  // namespace rekindle
