#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "src/base/blake3.h"
#include "src/tensor/canonical.h"
#include "src/tensor/tile.h"

// Digests of boxes inside larger arrays. Nothing here owns memory across an access to `array`: it
// may be a mapping whose file was truncated, and the reader is then left by a longjmp.
namespace rekindle {

namespace {

// Short runs are gathered into a buffer that stays in the cache, because each streaming update
// costs more than copying them; runs at least this long are hashed where they lie.
constexpr std::uint64_t kGatherBelowBytes = 4 << 10;
constexpr std::uint64_t kBufferBytes = 32 << 10;
// Rows of a strided tile lie in different pages, where the CPU's own prefetcher does not follow.
constexpr std::uint64_t kPrefetchBytes = 4 << 10;
constexpr std::uint64_t kCacheLineBytes = 64;

constexpr std::string_view kPartsContext = "rekindle 2026-11 parts of a tile";
constexpr std::string_view kTensorContext = "rekindle 2026-11 tensor node";
constexpr std::string_view kRootContext = "rekindle 2026-11 checkpoint root";

// BLAKE3 of runs, one per thread.
class RunHasher {
 public:
  RunHasher() = default;
  explicit RunHasher(std::string_view derive_context) : hasher_(derive_context) {}

  void reset() {
    hasher_.reset();
    used_ = 0;
  }

  void add(const StridedCopy& copy, const std::byte* src) {
    const std::byte* run = src + copy.src_offset;
    for (std::uint64_t left = copy.count; left > 0;) {
      std::uint64_t taken = 1;
      if (copy.run_bytes >= kGatherBelowBytes) {
        flush();
        hasher_.update({run, copy.run_bytes});
      } else {
        if (copy.run_bytes > kBufferBytes - used_) flush();
        taken = std::min(left, (kBufferBytes - used_) / copy.run_bytes);
        gather(run, copy.run_bytes, taken, left, copy.src_stride);
      }
      run += taken * copy.src_stride;
      left -= taken;
    }
  }

  Digest digest() {
    flush();
    return hasher_.finish();
  }

 private:
  // Copies `count` of the `left` runs that are still to come. The short lengths that row-parallel
  // shards make are constants, so that each copy is a few instructions.
  void gather(const std::byte* run, std::uint64_t run_bytes, std::uint64_t count,
              std::uint64_t left, std::uint64_t stride) {
    std::byte* const to = buffer_.get() + used_;
    const auto loop = [&](auto bytes) {
      const std::uint64_t ahead = kPrefetchBytes / bytes + 1;
      const std::uint64_t prefetched = left > ahead ? left - ahead : 0;
      for (std::uint64_t i = 0; i < count; ++i) {
        const std::byte* const from = run + i * stride;
        if (i < prefetched) {
          const std::byte* const later = from + ahead * stride;
          for (std::uint64_t at = 0; at < bytes; at += kCacheLineBytes) {
            __builtin_prefetch(later + at);
          }
        }
        std::memcpy(to + i * bytes, from, bytes);
      }
    };
    using std::integral_constant;
    switch (run_bytes) {
      case 64:
        loop(integral_constant<std::uint64_t, 64>());
        break;
      case 128:
        loop(integral_constant<std::uint64_t, 128>());
        break;
      case 256:
        loop(integral_constant<std::uint64_t, 256>());
        break;
      default:
        loop(run_bytes);
    }
    used_ += count * run_bytes;
  }
  void flush() {
    hasher_.update({buffer_.get(), used_});
    used_ = 0;
  }

  const std::unique_ptr<std::byte[]> buffer_ = std::make_unique<std::byte[]>(kBufferBytes);
  Blake3 hasher_;
  std::uint64_t used_ = 0;
};

struct Scratch {
  RunHasher leaf;
  RunHasher parts{kPartsContext};
  std::vector<StridedCopy> copies;
};

Scratch& scratch() {
  thread_local Scratch instance;
  return instance;
}

}  // namespace

Digest digest_box(const Box& box, std::uint64_t element_bytes, std::span<const std::byte> array,
                  const Box& held) {
  Scratch& local = scratch();
  local.copies.clear();
  strided_copies(box, held, box, element_bytes, local.copies);
  if (local.copies.empty()) return blake3({});
  const StridedCopy& first = local.copies.front();
  if (local.copies.size() == 1 && first.count == 1) {
    return blake3(array.subspan(first.src_offset, first.run_bytes));
  }
  local.leaf.reset();
  for (const StridedCopy& copy : local.copies) local.leaf.add(copy, array.data());
  return local.leaf.digest();
}

Digest digest_tile(const TensorInfo& info, const TileGrid& grid, std::uint64_t local_tile,
                   std::span<const std::byte> array, const Box& held) {
  return digest_box(grid.tile_box(local_tile), dtype_size_bytes(info.dtype), array, held);
}

Digest digest_parts(std::span<const HeldBox> parts, std::uint64_t element_bytes) {
  Scratch& local = scratch();
  local.parts.reset();
  for (const HeldBox& part : parts) {
    local.copies.clear();
    strided_copies(part.box, part.held, part.box, element_bytes, local.copies);
    for (const StridedCopy& copy : local.copies) local.parts.add(copy, part.array.data());
  }
  return local.parts.digest();
}

Digest checkpoint_root(const ModelVersion& id, const TensorSet& tensors, const TileMap& tiles,
                       std::span<const Digest> leaves) {
  canonical::Writer out;
  out.text(id.model);
  out.u64(id.version);
  out.digest(tensors.digest());
  out.u64(tensors.size());
  Blake3 node(kTensorContext);
  for (TensorIndex tensor = 0; tensor < tensors.size(); ++tensor) {
    const TileIndex first = tiles.first_tile(tensor);
    const auto own = leaves.subspan(first, tiles.first_tile(tensor + 1) - first);
    node.reset();
    node.update(std::as_bytes(own));
    out.digest(node.finish());
  }
  return blake3_derive(kRootContext, as_bytes(out.take()));
}

}  // namespace rekindle
