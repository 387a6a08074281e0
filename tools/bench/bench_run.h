#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/base/result.h"
#include "tools/bench/bench_memory.h"
#include "tools/bench/bench_source.h"
#include "tools/bench/bench_verbs.h"

namespace rekindle::bench {

// What one measurement needs. All ways of moving the bytes use the same memory at both ends.
struct Setup {
  const Pool& source_pool;  // also mapped here, for memcpy
  const Pool& destination;
  std::span<const Digest> digests;  // of the source's tiles
  std::span<const std::unique_ptr<SourceProcess>> sources;
  std::string transport;
  std::size_t streams = 1;
  std::uint64_t total_bytes = 0;
  std::uint64_t block_bytes = 0;
  std::uint64_t slice_bytes = 0;
  VerbsPuller* verbs = nullptr;  // for that transport
};

struct Measured {
  double wall_seconds = 0;
  double cpu_seconds = 0;             // of all processes
  std::vector<double> slice_seconds;  // posted to landed; empty for raw ones
};

// Through the engine.
Result<Measured> measure_engine(const Setup& setup, bool integrity);
// Blocking sockets, one thread per stream at each end.
Result<Measured> measure_sockets(const Setup& setup, bool integrity);
// memcpy, one thread per stream.
Result<Measured> measure_memcpy(const Setup& setup, bool integrity);

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// CPU time of this process and the sources so far.
double cpu_seconds(const Setup& setup);

}  // namespace rekindle::bench
