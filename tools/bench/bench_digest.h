#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "src/base/result.h"

// `rekindle bench digest`: BLAKE3-256 of tiles of 1 MiB on one core at each SIMD level, on all
// cores and on the first GPU, beside their limits in the same run: memcpy, XXH3, and a copy inside
// the GPU's memory. Rounds are interleaved and the figures are medians.
namespace rekindle::bench {

struct DigestOptions {
  std::uint64_t bytes = std::uint64_t{1} << 30;      // of host memory; larger than the caches
  std::uint64_t gpu_bytes = std::uint64_t{4} << 30;  // of the GPU's memory; 0: without it
  std::size_t rounds = 5;
};

struct DigestRow {
  std::string name;
  double gb_per_second = 0;  // decimal; of what is read, and for a copy written, too
  std::string limit;         // the name of the row that is its limit; "" for a limit
  double ratio = 0;          // to that row
};

struct DigestReport {
  DigestOptions options;
  std::vector<DigestRow> rows;
  std::string no_gpu;  // why there are no rows of a GPU; "" when there are
};

// kInvalid: bad options. kCorrupt: two levels, or the GPU and the CPU, disagree.
Result<DigestReport> run_bench_digest(const DigestOptions& options);

std::string to_text(const DigestReport& report);
std::string to_json(const DigestReport& report);

// Seconds for `repeats` passes over all bytes, in each round.
struct GpuDigestTimes {
  std::string name;
  std::uint64_t bytes = 0;  // whole tiles
  int repeats = 0;
  std::vector<double> copy;    // of one half to the other: all bytes are read or written
  std::vector<double> digest;  // of all tiles
};
// kUnavailable: no GPU, or a build without CUDA. In bench_digest_gpu.cc and bench_digest_no_gpu.cc.
Result<GpuDigestTimes> measure_gpu_digests(std::uint64_t bytes, std::size_t rounds);

}  // namespace rekindle::bench
