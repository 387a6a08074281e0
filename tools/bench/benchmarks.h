#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/result.h"
#include "src/bucket/device.h"
#include "transport/verbs/host/hca_filter.h"

// The benchmarks of `rekindle bench`. Each measures the product next to its limit on this machine.
// Rounds are interleaved and the figures are medians, so that a machine that is busy with something
// else slows both alike.
namespace rekindle::transport::verbs {
class Fabric;
}

namespace rekindle::bench {

// --- `bench transfer`: the transfer engine between real processes, next to plain sockets, a
// parallel memcpy or plain READs.

// The RDMA ports of both ends.
struct VerbsOptions {
  transport::verbs::FabricOptions puller;
  transport::verbs::FabricOptions source;
};

struct TransferOptions {
  // "shm" or "verbs".
  std::string transport = "tcp";
  // Contiguous bytes per request.
  std::uint64_t block_bytes = std::uint64_t{64} << 20;
  // Per measurement.
  std::uint64_t total_bytes = std::uint64_t{4} << 30;
  // For each source. 0: the best number for the transport here.
  std::size_t streams = 0;
  // Processes that serve.
  std::size_t sources = 1;
  std::size_t rounds = 5;
  // The rate of each source, as a link of that speed would have it. 0: no limit. Only for tcp.
  std::uint64_t link_bytes_per_second = 0;
  // Also measures reads of rows of this size that lie twice as far from each other, as in a column
  // shard of two ranks. It divides the slice. 0: none.
  std::uint64_t row_bytes = 0;
  // Congestion control of both kinds of sockets. "": the host's. Only for tcp.
  std::string tcp_congestion;
  // The bytes to move: each measurement moves the whole file once. Empty: noise.
  std::string file;
  // Gets the bytes that arrived in the last measurement. Empty: none.
  std::string save;
  // Each measurement begins with a destination without pages, so that it also pays for page faults.
  bool cold = false;
  VerbsOptions verbs;
};

struct TransferRow {
  // "rekindle", "plain sockets", …
  std::string name;
  // BLAKE3 of every 1 MiB tile, checked.
  bool integrity = false;
  // Decimal, median of the rounds.
  double gb_per_second = 0;
  // Over the rounds.
  double lowest = 0, highest = 0;
  // User and system time of all processes, median.
  double cpu_seconds_per_gb = 0;
  // From the posting of a slice to its landing.
  std::optional<double> p50_ms;
  std::optional<double> p99_ms;
};

struct TransferReport {
  // With the defaults filled in.
  TransferOptions options;
  unsigned cpus = 0;
  // The memory that is read over and over, at each end.
  std::uint64_t pool_bytes = 0;
  std::uint64_t slice_bytes = 0;
  std::vector<TransferRow> rows;
  // rekindle over the raw limit, without integrity.
  double ratio = 0;
  double ratio_with_integrity = 0;
  // Rekindle's CPU time for each byte over that of the raw limit, without and with integrity.
  double cpu_ratio = 0;
  double cpu_ratio_with_integrity = 0;
  // Rows over one piece, without integrity; 0 without rows.
  double ratio_of_rows = 0;
  // The additional time, as a fraction.
  double integrity_cost = 0;
};

// Forks the serving processes: call it before other threads are started. kInvalid for bad options.
Result<TransferReport> run_bench_transfer(const TransferOptions& options);

std::string to_text(const TransferReport& report);
std::string to_json(const TransferReport& report);

// --- `bench register --gpu`: tmpfs memory pinned for a GPU as the device process pins segments,
// fresh and with its pages there, next to touching as many fresh pages without it.

struct PinOptions {
  std::uint64_t bytes = std::uint64_t{1} << 30;
  bool huge = false;
  std::size_t rounds = 5;
};

struct PinReport {
  PinOptions options;
  std::string device;
  // All rates are decimal GB/s.
  double touched = 0;
  // Pinned pages that the pinning faulted in.
  double fresh = 0;
  // Pinned pages that were there.
  double resident = 0;
  double unpinned = 0;
};

// kInvalid: bad options; what the device says when it does not pin.
Result<PinReport> run_bench_pin(bucket::Device& device, const PinOptions& options);

std::string to_text(const PinReport& report);
std::string to_json(const PinReport& report);

// --- `bench register`: memory of a fresh tmpfs file, registered with all RDMA devices, next to
// touching and mlock() of as many fresh pages without them.

struct RegisterOptions {
  std::uint64_t bytes = std::uint64_t{1} << 30;
  // Hugetlbfs pages.
  bool huge = false;
  std::size_t rounds = 5;
};

struct RegisterRow {
  std::string name;
  // Decimal, median of the rounds.
  double gb_per_second = 0;
  // Over the rounds.
  double lowest = 0, highest = 0;
};

struct RegisterReport {
  RegisterOptions options;
  unsigned cpus = 0;
  std::vector<std::string> devices;
  // Touching, mlock, each device, all devices, …
  std::vector<RegisterRow> rows;
  // The share of touching in the time that registering fresh memory takes.
  double touch_share = 0;
  // Fresh memory, ready on all devices, over touching it.
  double ratio_touch = 0;
  std::optional<double> ratio_mlock;
};

// kInvalid: bad options; kExhausted, …: what the registrar says when not all of it is registered.
Result<RegisterReport> run_bench_register(transport::verbs::Fabric& fabric,
                                          const RegisterOptions& options);

std::string to_text(const RegisterReport& report);
std::string to_json(const RegisterReport& report);

// --- `bench store`: publishing files, and the memory work of a pull (allocate, fill, commit) into
// fresh memory and into the reserve, next to parallel copies between memory that is there.

struct StoreBenchOptions {
  // The scratch directory lies beside it, so on the same file system unless the store has its own
  // mount.
  std::filesystem::path store;
  std::uint64_t bytes = std::uint64_t{2} << 30;
  std::size_t rounds = 3;
};

struct StoreReport {
  struct Row {
    std::string name;
    // All medians of the rounds.
    double milliseconds = 0;
    double gb_per_second = 0;
    // CPU time in the kernel, of all threads.
    double system_seconds_per_gb = 0;
  };
  StoreBenchOptions options;
  std::vector<Row> rows;
  // The name says what over what; medians of the rounds' ratios.
  std::vector<std::pair<std::string, double>> ratios;
  // The part of the copies' bytes that lies in huge pages.
  double huge_share = 0;
};

// kInvalid: bad options. kExhausted: no room; it takes four times the bytes.
Result<StoreReport> run_bench_store(const StoreBenchOptions& options);

std::string to_text(const StoreReport& report);
std::string to_json(const StoreReport& report);

// --- `bench digest`: BLAKE3-256 of tiles of 1 MiB on one core at each SIMD level, on all cores and
// on the first GPU, next to memcpy, XXH3, and a copy inside the GPU's memory.

struct DigestOptions {
  // Host memory; more than the caches hold.
  std::uint64_t bytes = std::uint64_t{1} << 30;
  // Memory of the GPU. 0: the GPU is left out.
  std::uint64_t gpu_bytes = std::uint64_t{4} << 30;
  std::size_t rounds = 5;
};

struct DigestRow {
  std::string name;
  // Decimal. A copy counts the bytes that it reads and those that it writes.
  double gb_per_second = 0;
  // The name of the row with its limit; "" if this is one.
  std::string limit;
  // The ratio to that row.
  double ratio = 0;
};

struct DigestReport {
  DigestOptions options;
  std::vector<DigestRow> rows;
  // The reason if there are no rows for a GPU.
  std::string no_gpu;
};

// kInvalid: bad options. kCorrupt: two levels, or the GPU and the CPU, disagree.
Result<DigestReport> run_bench_digest(const DigestOptions& options);

std::string to_text(const DigestReport& report);
std::string to_json(const DigestReport& report);

// Seconds for `repeats` passes over all bytes, in each round.
struct GpuDigestTimes {
  std::string name;
  // Whole tiles.
  std::uint64_t bytes = 0;
  int repeats = 0;
  // Copies one half to the other: each byte is read or written.
  std::vector<double> copy;
  // Digests all tiles.
  std::vector<double> digest;
};
// kUnavailable: no GPU, or a build without CUDA.
Result<GpuDigestTimes> measure_gpu_digests(std::uint64_t bytes, std::size_t rounds);

}  // namespace rekindle::bench
