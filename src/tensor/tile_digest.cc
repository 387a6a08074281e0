#include <algorithm>
#include <cstring>
#include <memory>

#include "src/base/digest.h"
#include "src/tensor/canonical.h"
#include "src/tensor/tile.h"

// Digests of boxes inside larger arrays. Nothing here owns memory across an access to `array`: it
// may be a mapping whose file was truncated, and the reader is then left by a longjmp.
namespace rekindle {

namespace {

// Runs at least this long are hashed where they lie; shorter ones are gathered first, because each
// streaming update costs more than copying them.
constexpr std::uint64_t kGatherBelowBytes = 8 << 10;

struct Scratch {
  std::unique_ptr<std::byte[]> bytes = std::make_unique<std::byte[]>(kMaxTileBytes);
  Hasher64 hasher{0};
  std::vector<StridedCopy> copies;
};

Scratch& scratch() {
  thread_local Scratch instance;
  return instance;
}

template <std::size_t kRunBytes>
std::byte* gather_fixed(const StridedCopy& copy, const std::byte* src, std::byte* dst) {
  for (std::uint64_t i = 0; i < copy.count; ++i) {
    std::memcpy(dst, src + copy.src_offset + i * copy.src_stride, kRunBytes);
    dst += kRunBytes;
  }
  return dst;
}

std::byte* gather(const StridedCopy& copy, const std::byte* src, std::byte* dst) {
  switch (copy.run_bytes) {
    case 16:
      return gather_fixed<16>(copy, src, dst);
    case 64:
      return gather_fixed<64>(copy, src, dst);
    case 128:
      return gather_fixed<128>(copy, src, dst);
    case 256:
      return gather_fixed<256>(copy, src, dst);
    default:
      for (std::uint64_t i = 0; i < copy.count; ++i) {
        std::memcpy(dst, src + copy.src_offset + i * copy.src_stride, copy.run_bytes);
        dst += copy.run_bytes;
      }
      return dst;
  }
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
  const std::uint64_t total = box.elements() * element_bytes;
  if (first.run_bytes < kGatherBelowBytes && total <= kMaxTileBytes) {
    std::byte* end = local.bytes.get();
    for (const StridedCopy& copy : local.copies) end = gather(copy, array.data(), end);
    return xxh3_64({local.bytes.get(), total}, seed);
  }
  local.hasher.reset(seed);
  for (const StridedCopy& copy : local.copies) {
    for (std::uint64_t i = 0; i < copy.count; ++i) {
      local.hasher.update(array.subspan(copy.src_offset + i * copy.src_stride, copy.run_bytes));
    }
  }
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
