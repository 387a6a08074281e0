#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "tools/bench/bench_verbs.h"

// `rekindle bench transfer`: the transfer engine between real processes, next to what plain sockets
// (a parallel memcpy, plain READs) do in the same run. Rounds are interleaved and the figures are
// medians, so that a machine that is busy with something else slows both alike.
namespace rekindle::bench {

struct TransferOptions {
  std::string transport = "tcp";                        // "shm" or "verbs"
  std::uint64_t block_bytes = std::uint64_t{64} << 20;  // contiguous bytes per request
  std::uint64_t total_bytes = std::uint64_t{4} << 30;   // per measurement
  std::size_t streams = 0;  // per source; 0: what the transport does best here
  std::size_t sources = 1;  // processes that serve
  std::size_t rounds = 5;
  // Of each source, as a link of that speed would have it; 0: as fast as it goes. tcp only.
  std::uint64_t link_bytes_per_second = 0;
  VerbsOptions verbs;
};

struct TransferRow {
  std::string name;                // "rekindle", "plain sockets", …
  bool integrity = false;          // BLAKE3 of every 1 MiB tile, checked
  double gb_per_second = 0;        // decimal, median of the rounds
  double lowest = 0, highest = 0;  // of the rounds
  double cpu_seconds_per_gb = 0;   // of all processes, user and system, median
  std::optional<double> p50_ms;    // of a slice, posted to landed
  std::optional<double> p99_ms;
};

struct TransferReport {
  TransferOptions options;  // with the defaults filled in
  unsigned cpus = 0;
  std::uint64_t pool_bytes = 0;  // of memory that is read over and over, at each end
  std::uint64_t slice_bytes = 0;
  std::vector<TransferRow> rows;
  double ratio = 0;  // rekindle over the raw limit, without integrity
  double ratio_with_integrity = 0;
  double integrity_cost = 0;  // more time, as a fraction
};

// Forks the serving processes: call it before other threads are started. kInvalid for bad options.
Result<TransferReport> run_bench_transfer(const TransferOptions& options);

std::string to_text(const TransferReport& report);
std::string to_json(const TransferReport& report);

}  // namespace rekindle::bench
