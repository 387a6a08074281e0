#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "src/base/worker_pool.h"
#include "tools/bench/bench_run.h"
#include "transport/engine.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::bench {
namespace {

constexpr auto kConnectTime = std::chrono::seconds(5);
// A measurement that stalls for so long has failed.
constexpr auto kEngineDrainTime = std::chrono::minutes(10);

// `total` bytes, read from the pool around and around.
class BenchReads final : public transport::SliceSource, public transport::BatchObserver {
 public:
  // `row_bytes`: 0 reads each slice in one piece.
  BenchReads(const Setup& setup, bool integrity, std::uint64_t row_bytes)
      : setup_(setup),
        row_bytes_(row_bytes),
        slices_(static_cast<transport::SliceIndex>(setup.total_bytes / setup.slice_bytes)),
        posted_at_(slices_) {
    seconds_.reserve(slices_);
    if (integrity) {
      pool_.emplace("bench-digest", std::max<std::size_t>(std::thread::hardware_concurrency(), 1),
                    256);
    }
  }

  void set_batch(transport::Batch* batch) { batch_ = batch; }

  transport::SliceIndex slice_count() const override { return slices_; }
  transport::SliceInfo info(transport::SliceIndex) const override {
    const std::size_t count = setup_.sources.size();
    const std::uint64_t all = count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
    return {setup_.slice_bytes, transport::SourceMask(all)};
  }
  Result<void> expand(transport::SliceIndex slice, transport::SourceIndex source,
                      std::vector<transport::ReadOp>& out) override {
    const std::uint64_t at = offset(slice);
    posted_at_[slice] = std::chrono::steady_clock::now();
    if (row_bytes_ != 0) {
      // Every second row, because rows without gaps would be one piece.
      const std::uint64_t half = setup_.source_pool.bytes().size() / 2;
      const std::uint64_t first = at % half / setup_.slice_bytes * setup_.slice_bytes * 2;
      out.push_back({.remote = setup_.sources[source]->region(),
                     .remote_offset = first + (at < half ? 0 : row_bytes_),
                     .local = setup_.destination.bytes().data() + at,
                     .run_bytes = row_bytes_,
                     .count = static_cast<std::uint32_t>(setup_.slice_bytes / row_bytes_),
                     .remote_stride = 2 * row_bytes_,
                     .local_stride = row_bytes_});
      return {};
    }
    out.push_back({.remote = setup_.sources[source]->region(),
                   .remote_offset = at,
                   .local = setup_.destination.bytes().data() + at,
                   .run_bytes = setup_.slice_bytes});
    return {};
  }
  void landed(transport::SliceIndex slice, transport::SourceIndex) override {
    seconds_.push_back(seconds(std::chrono::steady_clock::now() - posted_at_[slice]));
    if (!pool_) return batch_->resolve(slice, transport::Verdict::kAccept);
    pool_->submit([this, slice] {
      const bool good = verify(slice);
      batch_->resolve(slice, good ? transport::Verdict::kAccept : transport::Verdict::kRetry);
    });
  }
  void dropped(transport::SliceIndex, transport::SourceIndex) override {}

  void on_source_lost(transport::SourceIndex, const Error&) override {}
  void on_starved(const transport::Starvation&) override {}
  void on_finished(const Result<void>& outcome) override {
    const std::lock_guard lock(mutex_);
    finished_at_ = std::chrono::steady_clock::now();
    outcome_ = outcome;
    changed_.notify_all();
  }

  Result<TimePoint> wait() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kEngineDrainTime, [&] { return outcome_.has_value(); })) {
      return fail(ErrorCode::kTimeout, "the transfer did not end");
    }
    if (!*outcome_) return fail(outcome_->error());
    return finished_at_;
  }
  std::vector<double> take_seconds() { return std::move(seconds_); }

 private:
  std::uint64_t offset(transport::SliceIndex slice) const {
    return slice * setup_.slice_bytes % setup_.source_pool.bytes().size();
  }
  bool verify(transport::SliceIndex slice) const {
    return verify_slice(setup_.destination.bytes(), offset(slice), setup_.slice_bytes,
                        setup_.digests);
  }

  const Setup& setup_;
  const std::uint64_t row_bytes_;
  const transport::SliceIndex slices_;
  std::vector<TimePoint> posted_at_;
  std::vector<double> seconds_;
  transport::Batch* batch_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Result<void>> outcome_;
  TimePoint finished_at_{};
  std::optional<WorkerPool> pool_;  // last: its jobs use the rest
};

Result<Measured> run_engine(const Setup& setup, bool integrity, std::uint64_t row_bytes,
                            std::vector<transport::Paths> paths) {
  const auto engine = transport::Engine::create({});
  BenchReads reads(setup, integrity, row_bytes);
  const double cpu_before = cpu_seconds(setup);
  const TimePoint start = std::chrono::steady_clock::now();
  const auto batch = engine->start(reads, reads, {});
  reads.set_batch(batch.get());
  for (std::size_t i = 0; i < paths.size(); ++i) {
    batch->add_paths(static_cast<transport::SourceIndex>(i), std::move(paths[i]));
  }
  TRY(const TimePoint end, reads.wait());
  return Measured{.wall_seconds = seconds(end - start),
                  .cpu_seconds = cpu_seconds(setup) - cpu_before,
                  .slice_seconds = reads.take_seconds()};
}

Result<Measured> connect_and_run(const Setup& setup, bool integrity, std::uint64_t row_bytes) {
  if (setup.transport == "verbs") {
    std::vector<transport::Paths> made;
    for (const auto& source : setup.sources) {
      TRY(auto links, setup.verbs->connect(*source));
      made.push_back(std::move(links));
    }
    return run_engine(setup, integrity, row_bytes, std::move(made));
  }
  const auto connector = setup.transport == "tcp"
                             ? transport::tcp::make_connector(setup.tcp_congestion)
                             : transport::shm::make_connector();
  std::vector<std::vector<std::unique_ptr<transport::Path>>> paths(setup.sources.size());
  for (std::size_t i = 0; i < setup.sources.size(); ++i) {
    for (std::size_t stream = 0; stream < setup.streams; ++stream) {
      TRY(auto path, connector->connect(setup.sources[i]->target(),
                                        std::chrono::steady_clock::now() + kConnectTime));
      paths[i].push_back(std::move(path));
    }
  }
  return run_engine(setup, integrity, row_bytes, std::move(paths));
}

}  // namespace

Result<Measured> measure_engine(const Setup& setup, bool integrity) {
  return connect_and_run(setup, integrity, 0);
}

Result<Measured> measure_rows(const Setup& setup, bool) {
  return connect_and_run(setup, false, setup.row_bytes);
}

}  // namespace rekindle::bench
