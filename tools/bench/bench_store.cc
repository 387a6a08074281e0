#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>

#include <sys/resource.h>

#include <nlohmann/json.hpp>

#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "src/store/huge_pages.h"
#include "src/store/segment_store.h"
#include "src/tensor/safetensors.h"
#include "tools/bench/bench_memory.h"
#include "tools/bench/bench_run.h"
#include "tools/bench/benchmarks.h"

namespace rekindle::bench {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kTensorBytes = 64 * kMiB;
constexpr std::uint64_t kFileBytes = 1 * kGiB;
constexpr std::uint64_t kUnitBytes = 4 * kMiB;
const ModelVersion kSourceId{"bench", 1};

struct Taken {
  double wall = 0;  // seconds
  double system = 0;
};

double system_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_stime.tv_usec) * 1e-6;
}

template <typename Work>
Result<Taken> timed(const Work& work) {
  const double system = system_seconds();
  const TimePoint begin = SteadyClock().now();
  if (auto done = work(); !done) return fail(done.error());
  return Taken{seconds(SteadyClock().now() - begin), system_seconds() - system};
}

// A directory beside the store, on its file system, that goes with this object.
class Scratch {
 public:
  static Result<Scratch> create(const fs::path& store) {
    std::uint8_t name[8];
    fill_random(name, sizeof name);
    fs::path path = store.parent_path() / ("rekindle-bench-" + to_hex(name, sizeof name));
    std::error_code error;
    fs::create_directories(path, error);
    if (error) return fail(ErrorCode::kDenied, "create {}: {}", path.string(), error.message());
    return Scratch(std::move(path));
  }
  Scratch(Scratch&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  explicit Scratch(fs::path path) : path_(std::move(path)) {}
  fs::path path_;
};

// Files of safetensors with noise in tensors of 64 MiB.
Result<std::uint64_t> write_files(const fs::path& directory, std::uint64_t bytes) {
  std::error_code ignored;
  fs::create_directories(directory, ignored);
  std::uint64_t written = 0;
  for (int file = 0; written < bytes; ++file) {
    std::vector<TensorInfo> tensors;
    for (std::uint64_t size = 0; size < kFileBytes && written < bytes; size += kTensorBytes) {
      const std::uint64_t rows = std::min(kTensorBytes, bytes - written) / kMiB;
      tensors.push_back({fmt::format("t{}", written / kTensorBytes), DType::kU8, {rows, kMiB}});
      written += rows * kMiB;
    }
    TRY(const std::string header, safetensors::make_header(tensors, {}, kPageBytes));
    std::uint64_t size = header.size();
    for (const TensorInfo& tensor : tensors) size += tensor.size_bytes();
    const fs::path path = directory / fmt::format("model-{:05}.safetensors", file + 1);
    TRY(auto segment, store::MappedSegment::create(path, size));
    std::memcpy(segment->writable().data(), header.data(), header.size());
    fill_with_noise(segment->writable().subspan(header.size()));
  }
  return written;
}

class StoreBench {
 public:
  StoreBench(fs::path scratch, std::uint64_t bytes, const Pool& warm)
      : scratch_(std::move(scratch)), bytes_(bytes), warm_(warm) {}

  Result<void> prepare() {
    TRY(published_, open("published", 0));
    TRY(reserved_, open("reserved", bytes_ + kFileBytes));
    TRY_VOID(publish(*published_));
    source_ = published_->find(kSourceId).front();
    return {};
  }

  Result<void> round() {
    TRY(rows_["copy and digest"].emplace_back(), timed([&] { return copy(true); }));
    TRY_VOID(publish_rows());
    TRY(rows_["copy"].emplace_back(), timed([&] { return copy(false); }));
    TRY(rows_["touch fresh memory"].emplace_back(), timed([&]() -> Result<void> {
          TRY(const auto memory, FreshMemory::create(bytes_, false));
          touch_pages(memory->bytes());
          return {};
        }));
    TRY_VOID(open_anew(pulled_, "pulled"));
    TRY_VOID(pull_rows(*pulled_, "fresh memory"));
    for (std::uint64_t added = 1; added != 0;) {
      TRY(added, reserved_->top_up_reserve());
    }
    return pull_rows(*reserved_, "the reserve");
  }

  const std::map<std::string, std::vector<Taken>>& rows() const { return rows_; }
  store::HugeBytes huge() const { return store::count_huge_bytes(scratch_); }

 private:
  Result<std::unique_ptr<store::SegmentStore>> open(const char* name, std::uint64_t reserve) {
    store::StoreOptions options;
    options.directory = scratch_ / name;
    options.pool_bytes = std::nullopt;
    options.reserve_bytes = reserve;
    return store::SegmentStore::open(options);
  }

  // An empty store, without pooled memory.
  Result<void> open_anew(std::unique_ptr<store::SegmentStore>& store, const char* name) {
    store.reset();
    std::error_code ignored;
    fs::remove_all(scratch_ / name, ignored);
    TRY(store, open(name, 0));
    return {};
  }

  Result<void> publish(store::SegmentStore& store) {
    const fs::path paths[] = {scratch_ / "files"};
    TRY(auto staged, store.stage(kSourceId, paths, nullptr));
    TRY_VOID(store.commit_staged(std::move(staged)));
    return {};
  }

  // Into memory that nobody has touched, then into that of the copy before.
  Result<void> publish_rows() {
    source_.reset();
    TRY_VOID(open_anew(published_, "published"));
    TRY(rows_["publish into fresh memory"].emplace_back(),
        timed([&] { return publish(*published_); }));
    TRY_VOID(published_->retire(kSourceId));
    TRY(rows_["publish into the pool"].emplace_back(), timed([&] { return publish(*published_); }));
    source_ = published_->find(kSourceId).front();
    return {};
  }

  // As a pull does it, with a memcpy for the network.
  Result<void> pull_rows(store::SegmentStore& store, const std::string& where) {
    const auto& checkpoint = source_->manifest.checkpoint;
    std::vector<TensorBox> boxes;
    for (TensorIndex i = 0; i < checkpoint->tensors.size(); ++i) {
      boxes.push_back({i, Box::whole(checkpoint->tensors[i].shape)});
    }
    TRY(auto packed, pack_layout(checkpoint->tensors, boxes, store::kMaxSegmentBytes));
    std::unique_ptr<store::PendingVersion> pending;
    TRY(rows_["begin in " + where].emplace_back(), timed([&]() -> Result<void> {
          TRY(pending, store.begin(checkpoint, packed));
          return {};
        }));
    TRY(rows_["fill " + where].emplace_back(), timed([&]() -> Result<void> {
          fill(*pending);
          return {};
        }));
    const TileIndex tiles = checkpoint->tiles.tile_count();
    for (TileIndex tile = 0; tile < tiles; ++tile) pending->mark_verified(tile);
    TRY(rows_["commit in " + where].emplace_back(), timed([&]() -> Result<void> {
          TRY_VOID(store.commit(std::move(pending)));
          return {};
        }));
    TRY_VOID(store.retire(kSourceId));
    return {};
  }

  void fill(store::PendingVersion& pending) {
    struct Piece {
      std::byte* to;
      const std::byte* from;
      std::uint64_t bytes;
    };
    std::vector<Piece> pieces;
    const Layout& layout = pending.manifest().layout;
    for (const LayoutEntry& entry : layout.entries()) {
      const auto from = source_->array(source_->manifest.layout.entries_of(entry.tensor)[0]);
      std::byte* const to = pending.segment(entry.segment).data() + entry.offset_bytes;
      for (std::uint64_t at = 0; at < from.size(); at += kUnitBytes) {
        pieces.push_back({to + at, from.data() + at, std::min(kUnitBytes, from.size() - at)});
      }
    }
    threads_.parallel_for(pieces.size(), [&](std::size_t i) {
      std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
    });
  }

  // The published bytes to memory that is there.
  Result<void> copy(bool digests) {
    std::vector<std::span<const std::byte>> units;
    for (const LayoutEntry& entry : source_->manifest.layout.entries()) {
      const auto array = source_->array(entry);
      for (std::uint64_t at = 0; at < array.size(); at += kUnitBytes) {
        units.push_back(array.subspan(at, std::min(kUnitBytes, array.size() - at)));
      }
    }
    threads_.parallel_for(units.size(), [&](std::size_t i) {
      std::byte* const to = warm_.bytes().data() + i * kUnitBytes;
      std::memcpy(to, units[i].data(), units[i].size());
      if (digests) (void)digest_tiles({to, units[i].size()}, kUnitBytes);
    });
    return {};
  }

  const fs::path scratch_;
  const std::uint64_t bytes_;
  const Pool& warm_;
  WorkerPool threads_{"bench", std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 16),
                      64};
  std::unique_ptr<store::SegmentStore> published_;
  std::unique_ptr<store::SegmentStore> pulled_;
  std::unique_ptr<store::SegmentStore> reserved_;
  std::shared_ptr<const store::StoredVersion> source_;
  std::map<std::string, std::vector<Taken>> rows_;
};

double median_of(const std::vector<Taken>& all, double Taken::*field) {
  std::vector<double> values;
  for (const Taken& one : all) values.push_back(one.*field);
  return median(std::move(values));
}

}  // namespace

Result<StoreReport> run_bench_store(const StoreBenchOptions& asked) {
  StoreBenchOptions options = asked;
  options.bytes = options.bytes / kTensorBytes * kTensorBytes;
  if (options.bytes < 2 * kTensorBytes || options.rounds == 0 || options.rounds > 100) {
    return fail(ErrorCode::kInvalid, "bench store: at least {}, 1 to 100 rounds",
                format_bytes(2 * kTensorBytes));
  }
  TRY(const Scratch scratch, Scratch::create(fs::absolute(options.store).lexically_normal()));
  TRY_VOID(write_files(scratch.path() / "files", options.bytes));
  TRY(const Pool warm, Pool::create(options.bytes));
  StoreBench bench(scratch.path(), options.bytes, warm);
  TRY_VOID(bench.prepare());
  for (std::size_t round = 0; round < options.rounds; ++round) TRY_VOID(bench.round());

  StoreReport report{.options = options, .rows = {}, .ratios = {}};
  const store::HugeBytes huge = bench.huge();
  report.huge_share =
      huge.all == 0 ? 0 : static_cast<double>(huge.huge) / static_cast<double>(huge.all);
  const auto bytes = static_cast<double>(options.bytes);
  for (const auto& [name, taken] : bench.rows()) {
    const double wall = median_of(taken, &Taken::wall);
    report.rows.push_back(
        {name, wall * 1e3, bytes / wall / 1e9, median_of(taken, &Taken::system) / bytes * 1e9});
  }
  // Of one round to the same round: what disturbed one has disturbed the other.
  const auto ratio = [&](const std::string& name, const std::vector<std::string>& limit,
                         const std::vector<std::string>& measured) {
    std::vector<double> ratios;
    for (std::size_t round = 0; round < options.rounds; ++round) {
      double over = 0;
      double under = 0;
      for (const auto& row : limit) over += bench.rows().at(row)[round].wall;
      for (const auto& row : measured) under += bench.rows().at(row)[round].wall;
      ratios.push_back(over / under);
    }
    report.ratios.push_back({name, median(std::move(ratios))});
  };
  ratio("publish into fresh memory / copy and digest", {"copy and digest"},
        {"publish into fresh memory"});
  ratio("publish into the pool / copy and digest", {"copy and digest"}, {"publish into the pool"});
  const std::vector<std::string> fresh = {"begin in fresh memory", "fill fresh memory",
                                          "commit in fresh memory"};
  ratio("pull into fresh memory / copy", {"copy"}, fresh);
  ratio("pull into fresh memory / touch it", {"touch fresh memory"}, fresh);
  ratio("pull into the reserve / copy", {"copy"},
        {"begin in the reserve", "fill the reserve", "commit in the reserve"});
  return report;
}

std::string to_text(const StoreReport& report) {
  std::string text = fmt::format(
      "bench store: {} on the file system of {}, {:.0f} % in huge pages, {} rounds, {} CPUs\n\n"
      "{:<28} {:>10} {:>8} {:>13}\n",
      format_bytes(report.options.bytes), report.options.store.string(), report.huge_share * 100,
      report.options.rounds, std::thread::hardware_concurrency(), "", "ms", "GB/s", "system s/GB");
  for (const auto& row : report.rows) {
    text += fmt::format("{:<28} {:>10.1f} {:>8.2f} {:>13.3f}\n", row.name, row.milliseconds,
                        row.gb_per_second, row.system_seconds_per_gb);
  }
  text += "\n";
  for (const auto& [name, value] : report.ratios) text += fmt::format("{}: {:.2f}\n", name, value);
  return text;
}

std::string to_json(const StoreReport& report) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const auto& row : report.rows) {
    rows.push_back({{"name", row.name},
                    {"ms", row.milliseconds},
                    {"gb_per_second", row.gb_per_second},
                    {"system_seconds_per_gb", row.system_seconds_per_gb}});
  }
  nlohmann::ordered_json ratios = nlohmann::ordered_json::object();
  for (const auto& [name, value] : report.ratios) ratios[name] = value;
  return nlohmann::ordered_json{{"bench", "store"},
                                {"bytes", report.options.bytes},
                                {"rounds", report.options.rounds},
                                {"huge_share", report.huge_share},
                                {"rows", rows},
                                {"ratios", ratios}}
             .dump(2) +
         "\n";
}

}  // namespace rekindle::bench
