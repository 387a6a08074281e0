#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <thread>

#include <nlohmann/json.hpp>

#include "src/base/units.h"
#include "tools/bench/bench_memory.h"
#include "tools/bench/bench_run.h"
#include "tools/bench/benchmarks.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::bench {
namespace {

// Larger than the caches, small enough for a laptop; read over and over.
constexpr std::uint64_t kPoolBytes = 512 * kMiB;
constexpr std::uint64_t kSliceBytes = 4 * kMiB;

struct Series {
  std::string name;
  bool integrity = false;
  Result<Measured> (*measure)(const Setup&, bool) = nullptr;
  std::vector<double> rates;  // bytes per second
  std::vector<double> cpu_per_byte;
  std::vector<double> slice_seconds;
};

double quantile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto last = static_cast<double>(values.size() - 1);
  return values[static_cast<std::size_t>(std::llround(fraction * last))];
}

Result<TransferOptions> complete(TransferOptions options) {
  if (options.transport != "tcp" && options.transport != "shm" && options.transport != "verbs") {
    return fail(ErrorCode::kInvalid, "bench transfer: transport '{}' is not tcp, shm or verbs",
                options.transport);
  }
  if (options.transport == "verbs") {
    constexpr std::size_t kQueuePairs = 2;  // as pulls have
    if (options.streams == 0) options.streams = kQueuePairs;
    if (options.block_bytes % kMiB != 0 || options.streams > 16) {
      return fail(ErrorCode::kInvalid,
                  "bench transfer: over verbs the block is a multiple of 1M, and streams (queue "
                  "pairs) are 1 to 16");
    }
  }
  if (options.link_bytes_per_second != 0 && options.transport != "tcp") {
    return fail(ErrorCode::kInvalid, "bench transfer: --link limits tcp, not {}",
                options.transport);
  }
  if (options.row_bytes != 0 && !options.save.empty()) {
    return fail(ErrorCode::kInvalid,
                "bench transfer: --save wants the whole pool as it was read, so not with --rows");
  }
  if (!options.tcp_congestion.empty() && options.transport != "tcp") {
    return fail(ErrorCode::kInvalid, "bench transfer: --tcp-congestion is for tcp, not {}",
                options.transport);
  }
  TRY_VOID(transport::tcp::check_congestion_control(options.tcp_congestion));
  const std::size_t cpus = std::max(1u, std::thread::hardware_concurrency());
  if (options.streams == 0) options.streams = std::clamp<std::size_t>(cpus, 1, 8);
  if (options.sources == 0 || options.sources > 16 || options.streams > 64) {
    return fail(ErrorCode::kInvalid, "bench transfer: 1 to 16 sources, 1 to 64 streams each");
  }
  if (options.rounds == 0 || options.rounds > 1000) {
    return fail(ErrorCode::kInvalid, "bench transfer: 1 to 1000 rounds");
  }
  if (options.block_bytes < 64 * kKiB || options.block_bytes % (64 * kKiB) != 0 ||
      options.block_bytes > kPoolBytes) {
    return fail(ErrorCode::kInvalid,
                "bench transfer: the block must be a multiple of 64K and at most 512M");
  }
  if (options.cold && options.transport == "verbs") {
    return fail(ErrorCode::kInvalid,
                "bench transfer: --cold is for tcp and shm; verbs registers pages beforehand");
  }
  // Whole blocks, and the same for every stream's share.
  const std::uint64_t unit = options.block_bytes;
  if (options.file.empty()) {
    options.total_bytes = std::max(options.total_bytes / unit, std::uint64_t{1}) * unit;
    return options;
  }
  std::error_code error;
  options.total_bytes = std::filesystem::file_size(options.file, error);
  if (error) {
    return fail(ErrorCode::kNotFound, "bench transfer: --file '{}': {}", options.file,
                error.message());
  }
  if (options.total_bytes == 0 || options.total_bytes % unit != 0) {
    return fail(ErrorCode::kInvalid,
                "bench transfer: '{}' has {} bytes, which is no multiple of the block of {}",
                options.file, options.total_bytes, format_bytes(unit));
  }
  return options;
}

std::vector<Series> make_series(const TransferOptions& options) {
  const std::string& transport = options.transport;
  auto raw = measure_memcpy;
  const char* raw_name = "parallel memcpy";
  if (transport == "tcp") {
    raw = measure_sockets;
    raw_name = "plain sockets";
  } else if (transport == "verbs") {
    raw = measure_plain_reads;
    raw_name = "plain reads";
  }
  std::vector<Series> all = {{.name = raw_name, .integrity = false, .measure = raw},
                             {.name = "rekindle", .integrity = false, .measure = measure_engine},
                             {.name = raw_name, .integrity = true, .measure = raw},
                             {.name = "rekindle", .integrity = true, .measure = measure_engine}};
  if (options.row_bytes != 0) {
    all.push_back({.name = fmt::format("rows of {}", format_bytes(options.row_bytes)),
                   .integrity = false,
                   .measure = measure_rows});
  }
  return all;
}

Result<void> measure_once(const Setup& setup, Series& series) {
  TRY(auto measured, series.measure(setup, series.integrity));
  const auto bytes = static_cast<double>(setup.total_bytes);
  series.rates.push_back(bytes / measured.wall_seconds);
  series.cpu_per_byte.push_back(measured.cpu_seconds / bytes);
  series.slice_seconds.insert(series.slice_seconds.end(), measured.slice_seconds.begin(),
                              measured.slice_seconds.end());
  return {};
}

TransferRow summarize(const Series& series) {
  TransferRow row{.name = series.name,
                  .integrity = series.integrity,
                  .gb_per_second = quantile(series.rates, 0.5) / 1e9,
                  .lowest = quantile(series.rates, 0) / 1e9,
                  .highest = quantile(series.rates, 1) / 1e9,
                  .cpu_seconds_per_gb = quantile(series.cpu_per_byte, 0.5) * 1e9};
  if (!series.slice_seconds.empty()) {
    row.p50_ms = quantile(series.slice_seconds, 0.5) * 1e3;
    row.p99_ms = quantile(series.slice_seconds, 0.99) * 1e3;
  }
  return row;
}

// The median of the ratios of one round to the next: what disturbed a round disturbed both.
double paired_ratio(const std::vector<double>& over, const std::vector<double>& under) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < over.size(); ++i) ratios.push_back(over[i] / under[i]);
  return quantile(std::move(ratios), 0.5);
}

}  // namespace

Result<TransferReport> run_bench_transfer(const TransferOptions& asked) {
  TRY(const TransferOptions options, complete(asked));
  const std::uint64_t block = options.block_bytes;
  // A second pass over a pool would find the pages of the first one.
  const bool one_pass = options.cold || !options.file.empty();
  const std::uint64_t pool_bytes =
      one_pass
          ? options.total_bytes
          : std::min(options.total_bytes, std::max(kPoolBytes / block, std::uint64_t{1}) * block);
  // Slices of equal size that fill a block.
  std::uint64_t slice = std::min(kSliceBytes, block);
  while (block % slice != 0) slice -= 64 * kKiB;
  if (options.row_bytes != 0 && (slice % options.row_bytes != 0 || slice / options.row_bytes < 2 ||
                                 pool_bytes % (2 * slice) != 0)) {
    return fail(
        ErrorCode::kInvalid,
        "bench transfer: --rows {}: a row divides the slice of {}, and the total is an even "
        "number of slices",
        options.row_bytes, format_bytes(slice));
  }

  TRY(const Pool source_pool, Pool::create(pool_bytes));
  TRY(const Pool destination, Pool::create(pool_bytes));
  if (options.file.empty()) {
    fill_with_noise(source_pool.bytes());
  } else {
    TRY_VOID(read_file(options.file, source_pool.bytes()));
  }
  const auto digests = digest_tiles(source_pool.bytes(), slice);
  std::vector<std::unique_ptr<SourceProcess>> sources;
  for (std::size_t i = 0; i < options.sources; ++i) {
    TRY(auto source,
        SourceProcess::start(source_pool,
                             {options.transport, options.streams, options.link_bytes_per_second,
                              options.tcp_congestion, options.verbs.source}));
    sources.push_back(std::move(source));
  }
  std::unique_ptr<VerbsPuller> verbs;
  if (options.transport == "verbs") {
    TRY(verbs, VerbsPuller::create(options.verbs.puller, destination, options.streams));
  }
  const Setup setup{source_pool,
                    destination,
                    digests,
                    sources,
                    options.transport,
                    options.streams,
                    options.total_bytes,
                    block,
                    slice,
                    options.row_bytes,
                    options.tcp_congestion,
                    verbs.get()};

  std::vector<Series> all = make_series(options);
  // One warm-up of each: page tables, caches, socket buffers.
  for (Series& series : all) TRY_VOID(series.measure(setup, series.integrity));
  for (std::size_t round = 0; round < options.rounds; ++round) {
    for (Series& series : all) {
      if (options.cold) TRY_VOID(destination.free_pages());
      TRY_VOID(measure_once(setup, series));
    }
  }
  if (!options.save.empty()) TRY_VOID(write_file(options.save, destination.bytes()));

  TransferReport report{.options = options,
                        .cpus = std::thread::hardware_concurrency(),
                        .pool_bytes = pool_bytes,
                        .slice_bytes = slice};
  for (const Series& series : all) report.rows.push_back(summarize(series));
  if (options.transport == "tcp" && report.options.tcp_congestion.empty()) {
    report.options.tcp_congestion = transport::tcp::host_congestion_control();
  }
  report.ratio = paired_ratio(all[1].rates, all[0].rates);
  report.ratio_with_integrity = paired_ratio(all[3].rates, all[2].rates);
  report.cpu_ratio = paired_ratio(all[1].cpu_per_byte, all[0].cpu_per_byte);
  report.cpu_ratio_with_integrity = paired_ratio(all[3].cpu_per_byte, all[2].cpu_per_byte);
  report.integrity_cost = 1.0 / paired_ratio(all[3].rates, all[1].rates) - 1.0;
  if (options.row_bytes != 0) report.ratio_of_rows = paired_ratio(all[4].rates, all[1].rates);
  return report;
}

std::string to_text(const TransferReport& report) {
  const TransferOptions& options = report.options;
  std::string text = fmt::format(
      "bench transfer --transport {}: {} per run in blocks of {}, {} source{}, {} stream{} each, "
      "{} rounds, {} CPUs\n\n",
      options.transport, format_bytes(options.total_bytes), format_bytes(options.block_bytes),
      options.sources, options.sources == 1 ? "" : "s", options.streams,
      options.streams == 1 ? "" : "s", options.rounds, report.cpus);
  if (options.link_bytes_per_second != 0) {
    text.insert(text.size() - 2, fmt::format(", each source limited to {}/s",
                                             format_bytes(options.link_bytes_per_second)));
  }
  if (!options.tcp_congestion.empty()) {
    text.insert(text.size() - 2, fmt::format(", {}", options.tcp_congestion));
  }
  text += fmt::format("{:<17} {:<10} {:>8} {:>15} {:>11} {:>9} {:>9}\n", "", "integrity", "GB/s",
                      "lowest-highest", "CPU s/GB", "p50 ms", "p99 ms");
  const auto cell = [](const std::optional<double>& value) {
    return value ? fmt::format("{:.2f}", *value) : std::string("-");
  };
  for (const TransferRow& row : report.rows) {
    text += fmt::format("{:<17} {:<10} {:>8.2f} {:>15} {:>11.3f} {:>9} {:>9}\n", row.name,
                        row.integrity ? "on" : "off", row.gb_per_second,
                        fmt::format("{:.2f}-{:.2f}", row.lowest, row.highest),
                        row.cpu_seconds_per_gb, cell(row.p50_ms), cell(row.p99_ms));
  }
  text += fmt::format(
      "\nrekindle / {}: {:.2f} (with integrity {:.2f}), CPU per byte {:.2f} ({:.2f}); integrity "
      "costs "
      "{:+.0f} % time\n",
      report.rows.front().name, report.ratio, report.ratio_with_integrity, report.cpu_ratio,
      report.cpu_ratio_with_integrity, report.integrity_cost * 100);
  if (options.row_bytes != 0) {
    text += fmt::format("{} / one piece: {:.2f}\n", report.rows.back().name, report.ratio_of_rows);
  }
  return text;
}

std::string to_json(const TransferReport& report) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const TransferRow& row : report.rows) {
    nlohmann::ordered_json item{{"name", row.name},
                                {"integrity", row.integrity},
                                {"gb_per_second", row.gb_per_second},
                                {"lowest", row.lowest},
                                {"highest", row.highest},
                                {"cpu_seconds_per_gb", row.cpu_seconds_per_gb}};
    if (row.p50_ms) item["slice_p50_ms"] = *row.p50_ms;
    if (row.p99_ms) item["slice_p99_ms"] = *row.p99_ms;
    rows.push_back(std::move(item));
  }
  nlohmann::ordered_json json{{"bench", "transfer"},
                              {"transport", report.options.transport},
                              {"block_bytes", report.options.block_bytes},
                              {"total_bytes", report.options.total_bytes},
                              {"streams", report.options.streams},
                              {"sources", report.options.sources},
                              {"rounds", report.options.rounds},
                              {"cold", report.options.cold},
                              {"link_bytes_per_second", report.options.link_bytes_per_second},
                              {"cpus", report.cpus},
                              {"pool_bytes", report.pool_bytes},
                              {"slice_bytes", report.slice_bytes},
                              {"rows", rows},
                              {"ratio", report.ratio},
                              {"ratio_with_integrity", report.ratio_with_integrity},
                              {"cpu_ratio", report.cpu_ratio},
                              {"cpu_ratio_with_integrity", report.cpu_ratio_with_integrity},
                              {"integrity_cost", report.integrity_cost}};
  if (!report.options.tcp_congestion.empty()) {
    json["tcp_congestion"] = report.options.tcp_congestion;
  }
  if (report.options.row_bytes != 0) {
    json["row_bytes"] = report.options.row_bytes;
    json["ratio_of_rows"] = report.ratio_of_rows;
  }
  return json.dump(2) + "\n";
}

}  // namespace rekindle::bench
