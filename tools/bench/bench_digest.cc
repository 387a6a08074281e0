#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>
#include <time.h>

#include "src/base/blake3.h"
#include "src/base/blake3_core.h"
#include "src/base/clock.h"
#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "src/base/xxh3.h"
#include "tools/bench/bench_memory.h"
#include "tools/bench/bench_run.h"
#include "tools/bench/benchmarks.h"

namespace rekindle::bench {

namespace {

constexpr const char* kOneCoreLimit = "XXH3, one core";

// The CPU time of the calling thread.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}
double wall_seconds() { return seconds(SteadyClock().now().time_since_epoch()); }

enum class Cores { kOne, kAll };

// One way to read all of the memory, and the seconds that it took in each round: on one core of CPU
// time, because other programs may use that core as well.
struct Contender {
  Cores cores = Cores::kOne;
  std::string name;
  std::string limit;
  std::uint64_t bytes = 0;  // read and written
  std::function<void()> run;
  std::vector<double> seconds;
};

class Contest {
 public:
  explicit Contest(const DigestOptions& options)
      : source_(options.bytes),
        copy_(options.bytes),
        digests_(options.bytes / kTileBytes),
        cores_(std::max(1u, std::thread::hardware_concurrency())),
        pool_("bench-digest", cores_, cores_) {
    fill_with_noise(source_);
    add(Cores::kOne, "memcpy, one core", "", 2 * options.bytes,
        [this] { std::memcpy(copy_.data(), source_.data(), source_.size()); });
    add(Cores::kOne, kOneCoreLimit, "", options.bytes, [this] {
      for (std::size_t i = 0; i < digests_.size(); ++i) hash_with_xxh3(i);
    });
    for (const auto* level : blake3_detail::supported_levels()) {
      add(Cores::kOne, fmt::format("BLAKE3 {}, one core", level->name), kOneCoreLimit,
          options.bytes, [this, level] {
            for (std::size_t i = 0; i < digests_.size(); ++i) {
              digests_[i] = blake3_detail::hash(*level, tile(i));
            }
          });
    }
    const std::string all = fmt::format("XXH3, all {} cores", cores_);
    add(Cores::kAll, all, "", options.bytes, [this] {
      pool_.parallel_for(digests_.size(), [this](std::size_t i) { hash_with_xxh3(i); });
    });
    add(Cores::kAll, fmt::format("BLAKE3 {}, all {} cores", blake3_simd_level(), cores_), all,
        options.bytes, [this] {
          pool_.parallel_for(digests_.size(),
                             [this](std::size_t i) { digests_[i] = blake3(tile(i)); });
        });
  }

  void run_round() {
    for (Contender& contender : contenders_) {
      const auto now = contender.cores == Cores::kOne ? thread_seconds : wall_seconds;
      const double begin = now();
      contender.run();
      contender.seconds.push_back(now() - begin);
    }
  }

  std::vector<DigestRow> rows() const {
    std::vector<DigestRow> rows;
    for (const Contender& contender : contenders_) {
      DigestRow row{contender.name,
                    static_cast<double>(contender.bytes) / median(contender.seconds) / 1e9,
                    contender.limit, 0};
      for (const DigestRow& other : rows) {
        if (other.name == row.limit) row.ratio = row.gb_per_second / other.gb_per_second;
      }
      rows.push_back(std::move(row));
    }
    return rows;
  }

 private:
  void add(Cores cores, std::string name, std::string limit, std::uint64_t bytes,
           std::function<void()> run) {
    contenders_.push_back({cores, std::move(name), std::move(limit), bytes, std::move(run), {}});
  }
  std::span<const std::byte> tile(std::size_t at) const {
    return std::span(source_).subspan(at * kTileBytes, kTileBytes);
  }
  // The result is kept, so that the compiler cannot leave the work out.
  void hash_with_xxh3(std::size_t at) {
    const std::uint64_t hash = xxh3_64(tile(at), 0);
    std::memcpy(digests_[at].bytes.data(), &hash, sizeof hash);
  }

  std::vector<std::byte> source_;
  std::vector<std::byte> copy_;
  std::vector<Digest> digests_;
  const std::size_t cores_;
  WorkerPool pool_;
  std::vector<Contender> contenders_;
};

void add_gpu(const GpuDigestTimes& times, DigestReport& report) {
  const auto rate = [&](const std::vector<double>& took) {
    return static_cast<double>(times.bytes) * times.repeats / median(took) / 1e9;
  };
  const std::string limit = "copy inside " + times.name;
  report.rows.push_back({limit, rate(times.copy), "", 0});
  report.rows.push_back({"BLAKE3 on " + times.name, rate(times.digest), limit,
                         rate(times.digest) / rate(times.copy)});
}

}  // namespace

Result<DigestReport> run_bench_digest(const DigestOptions& options) {
  if (options.bytes < kTileBytes || options.bytes % kTileBytes != 0 ||
      options.gpu_bytes % (2 * kTileBytes) != 0 || options.rounds == 0 || options.rounds > 1000) {
    return fail(ErrorCode::kInvalid,
                "bench digest: --bytes is a multiple of 1 MiB, --gpu-bytes of 2 MiB, and --rounds "
                "1 to 1000");
  }
  DigestReport report{.options = options};
  {
    Contest contest(options);
    for (std::size_t round = 0; round < options.rounds; ++round) contest.run_round();
    report.rows = contest.rows();
  }
  if (options.gpu_bytes == 0) {
    report.no_gpu = "--gpu-bytes is 0";
    return report;
  }
  auto times = measure_gpu_digests(options.gpu_bytes, options.rounds);
  if (times) {
    add_gpu(*times, report);
  } else if (times.error().code() == ErrorCode::kCorrupt) {
    return fail(std::move(times.error()));
  } else {
    report.no_gpu = times.error().message();
  }
  return report;
}

std::string to_text(const DigestReport& report) {
  std::string text = fmt::format(
      "bench digest: tiles of 1 MiB, {} of memory, {} rounds; copies count what they read and "
      "write, one core its CPU time\n\n{:<34} {:>9} {:>7}\n",
      format_bytes(report.options.bytes), report.options.rounds, "", "GB/s", "ratio");
  for (const DigestRow& row : report.rows) {
    text += fmt::format("{:<34} {:>9.2f}", row.name, row.gb_per_second);
    if (!row.limit.empty()) text += fmt::format(" {:>7.2f} of {}", row.ratio, row.limit);
    text += '\n';
  }
  if (!report.no_gpu.empty()) text += "\nno GPU: " + report.no_gpu + "\n";
  return text;
}

std::string to_json(const DigestReport& report) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const DigestRow& row : report.rows) {
    nlohmann::ordered_json entry{{"name", row.name}, {"gb_per_second", row.gb_per_second}};
    if (!row.limit.empty()) {
      entry["limit"] = row.limit;
      entry["ratio"] = row.ratio;
    }
    rows.push_back(std::move(entry));
  }
  nlohmann::ordered_json json{{"bench", "digest"},
                              {"bytes", report.options.bytes},
                              {"gpu_bytes", report.options.gpu_bytes},
                              {"rounds", report.options.rounds},
                              {"simd", blake3_simd_level()},
                              {"rows", std::move(rows)}};
  if (!report.no_gpu.empty()) json["no_gpu"] = report.no_gpu;
  return json.dump(2) + "\n";
}

}  // namespace rekindle::bench
