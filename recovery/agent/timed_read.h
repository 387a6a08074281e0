#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "src/async/task.h"
#include "src/base/clock.h"
#include "transport/engine.h"

namespace rekindle::agent {

// Reads a peer's region through the transfer engine again and again, for a given time, and
// measures. The bytes land in scratch memory and mean nothing. Control thread only, except the
// calls of the engine.
class TimedRead final : private transport::SliceSource, private transport::BatchObserver {
 public:
  // The largest slice.
  static constexpr std::uint64_t kSliceBytes = 4 << 20;

  struct Options {
    // Holds at least one slice, as does the region.
    std::span<std::byte> scratch;
    transport::RegionKey region;
    std::uint64_t region_bytes = 0;
    std::chrono::milliseconds time{2000};
  };
  struct PathFigure {
    transport::PathStats path;
    // Of `bytes` of Figures.
    std::uint64_t bytes = 0;
    bool broken = false;
  };
  struct Figures {
    // So many bytes have landed in this time. The time begins when the windows have grown.
    std::uint64_t bytes = 0;
    Duration elapsed{0};
    std::vector<PathFigure> paths;
    // Why the read ended early.
    std::optional<Error> why;
  };

  TimedRead(boost::asio::any_io_executor executor, transport::Engine& engine,
            const Options& options);
  ~TimedRead() override;

  // Returns when nothing writes to the scratch memory any more. A cancelled coroutine ends the
  // read; it must have been told not to throw.
  async::Task<Figures> run(transport::Paths paths);

 private:
  // --- the engine's thread
  transport::SliceIndex slice_count() const override { return slices_; }
  transport::SliceInfo info(transport::SliceIndex slice) const override;
  Result<void> expand(transport::SliceIndex slice, transport::SourceIndex source,
                      std::vector<transport::ReadOp>& out) override;
  void landed(transport::SliceIndex slice, transport::SourceIndex source) override;
  void dropped(transport::SliceIndex slice, transport::SourceIndex source) override;
  void on_source_lost(transport::SourceIndex source, const Error& cause) override;
  void on_starved(const transport::Starvation&) override {}
  void on_finished(const Result<void>& outcome) override;

  void free_slot(transport::SliceIndex slice);
  void wake();

  // Waits until then, or until the read is over. False: it is over, or the caller was cancelled.
  async::Task<bool> read_until(TimePoint when);

  const boost::asio::any_io_executor executor_;
  transport::Engine& engine_;
  const Options options_;
  const transport::SliceIndex slices_;
  const std::shared_ptr<async::Notifier> changed_;

  // Engine thread only.
  std::vector<std::byte*> free_slots_;
  std::map<transport::SliceIndex, std::byte*> used_slots_;

  std::mutex mutex_;
  // Guarded by mutex_, as are the rest up to `batch_`.
  bool counting_ = false;
  std::uint64_t bytes_ = 0;
  // The last landing before counting began.
  TimePoint began_{};
  std::optional<Error> why_;
  bool finished_ = false;

  std::unique_ptr<transport::Batch> batch_;
  // `batch_`, also while it is being destroyed: until then slices land.
  transport::Batch* landing_ = nullptr;
};

}  // namespace rekindle::agent
