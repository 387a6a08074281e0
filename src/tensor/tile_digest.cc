#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "src/base/digest.h"
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

// XXH3-64 of runs, one per thread.
class RunHasher {
 public:
  void reset(std::uint64_t seed) {
    hasher_.reset(seed);
    seed_ = seed;
    used_ = 0;
    streamed_ = false;
  }

  void add(const StridedCopy& copy, const std::byte* src) {
    const std::byte* run = src + copy.src_offset;
    for (std::uint64_t left = copy.count; left > 0;) {
      std::uint64_t taken = 1;
      if (copy.run_bytes >= kGatherBelowBytes) {
        flush();
        update({run, copy.run_bytes});
      } else {
        if (copy.run_bytes > kBufferBytes - used_) flush();
        taken = std::min(left, (kBufferBytes - used_) / copy.run_bytes);
        gather(run, copy.run_bytes, taken, left, copy.src_stride);
      }
      run += taken * copy.src_stride;
      left -= taken;
    }
  }

  std::uint64_t digest() {
    if (!streamed_) return xxh3_64({buffer_.get(), used_}, seed_);
    flush();
    return hasher_.digest();
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
  void update(std::span<const std::byte> bytes) {
    hasher_.update(bytes);
    streamed_ = true;
  }
  void flush() {
    if (used_ > 0) update({buffer_.get(), used_});
    used_ = 0;
  }

  const std::unique_ptr<std::byte[]> buffer_ = std::make_unique<std::byte[]>(kBufferBytes);
  Hasher64 hasher_{0};
  std::uint64_t seed_ = 0;
  std::uint64_t used_ = 0;
  bool streamed_ = false;
};

struct Scratch {
  RunHasher hasher;
  std::vector<StridedCopy> copies;
};

Scratch& scratch() {
  thread_local Scratch instance;
  return instance;
}

}  // namespace

std::uint64_t tile_seed(TensorIndex tensor, std::uint64_t local_tile) {
  // splitmix64 of the position: neighbours get unrelated seeds.
  std::uint64_t z = (std::uint64_t{tensor} << 32 ^ local_tile) + 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

std::uint64_t digest_tile(const TensorInfo& info, TensorIndex tensor, const TileGrid& grid,
                          std::uint64_t local_tile, std::span<const std::byte> array,
                          const Box& held) {
  return digest_box(grid.tile_box(local_tile), dtype_size_bytes(info.dtype),
                    tile_seed(tensor, local_tile), array, held);
}

std::uint64_t digest_box(const Box& box, std::uint64_t element_bytes, std::uint64_t seed,
                         std::span<const std::byte> array, const Box& held) {
  Scratch& local = scratch();
  local.copies.clear();
  strided_copies(box, held, box, element_bytes, local.copies);
  if (local.copies.empty()) return xxh3_64({}, seed);
  const StridedCopy& first = local.copies.front();
  if (local.copies.size() == 1 && first.count == 1) {
    return xxh3_64(array.subspan(first.src_offset, first.run_bytes), seed);
  }
  local.hasher.reset(seed);
  for (const StridedCopy& copy : local.copies) local.hasher.add(copy, array.data());
  return local.hasher.digest();
}

Digest128 checkpoint_root(const TensorSet& tensors, std::span<const std::uint64_t> tile_digests) {
  canonical::Writer out;
  out.raw("RKROOT01");
  out.digest(tensors.digest());
  out.u64(tile_digests.size());
  out.raw({reinterpret_cast<const char*>(tile_digests.data()), tile_digests.size_bytes()});
  return xxh3_128(as_bytes(out.take()));
}

}  // namespace rekindle
