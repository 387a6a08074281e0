// Digest rates by the shape of a tile in memory: contiguous, or strided runs as in a tensor whose
// last dimension is cut in 16. The working set is far larger than the caches; memcpy is the
// yardstick.
//   build/release/tests/bench/digest_bench
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#include "src/base/blake3.h"
#include "src/base/units.h"
#include "src/tensor/tile.h"

namespace rekindle {
namespace {

constexpr std::uint64_t kBytes = 512 * kMiB;

std::vector<std::byte> make_bytes() {
  std::vector<std::byte> bytes(kBytes);
  for (std::size_t i = 0; i < bytes.size(); i += 4096) bytes[i] = static_cast<std::byte>(i >> 12);
  return bytes;
}

void digest_tensor(benchmark::State& state, const Shape& shape) {
  const auto bytes = make_bytes();
  const TensorInfo info{"w", DType::kU8, shape};
  const TileGrid grid(info.dtype, shape);
  for (auto _ : state) {
    std::uint64_t sum = 0;
    for (std::uint64_t tile = 0; tile < grid.tile_count(); ++tile) {
      sum ^= digest_tile(info, grid, tile, bytes, Box::whole(shape)).bytes[0];
    }
    benchmark::DoNotOptimize(sum);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kBytes));
  state.SetLabel(std::string(blake3_simd_level()) + ", tile " + grid.tile_extent().to_string());
}

void BM_Contiguous(benchmark::State& state) { digest_tensor(state, {kBytes}); }
void BM_Strided(benchmark::State& state) {
  const auto run_bytes = static_cast<std::uint64_t>(state.range(0));
  digest_tensor(state, {kBytes / (16 * run_bytes), 16 * run_bytes});
}
void BM_Memcpy(benchmark::State& state) {
  const auto from = make_bytes();
  std::vector<std::byte> to(kBytes);
  for (auto _ : state) {
    for (std::uint64_t at = 0; at < kBytes; at += kMiB) {
      std::memcpy(to.data() + at, from.data() + at, kMiB);
    }
    benchmark::DoNotOptimize(to.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kBytes));
}

BENCHMARK(BM_Memcpy)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Contiguous)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Strided)->RangeMultiplier(2)->Range(64, 16384)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace rekindle

BENCHMARK_MAIN();
