#include "recovery/agent/timed_read.h"

#include <algorithm>
#include <utility>

#include <boost/asio/post.hpp>

namespace rekindle::agent {

using transport::SliceIndex;
using transport::SourceIndex;

namespace {

// In this part of the time, at most, the windows grow.
constexpr int kWarmUpPart = 4;
constexpr std::chrono::milliseconds kLongestWarmUp{500};
// More than the NICs of a host move.
constexpr std::uint64_t kMostBytesPerMs = 200'000'000;
// The first slices are small, so that a slow link is measured as well.
constexpr SliceIndex kSmallSlices = 32;
constexpr SliceIndex kMiddleSlices = 64;

std::uint64_t size_of(SliceIndex slice) {
  if (slice < kSmallSlices) return TimedRead::kSliceBytes / 16;
  if (slice < kSmallSlices + kMiddleSlices) return TimedRead::kSliceBytes / 4;
  return TimedRead::kSliceBytes;
}

SliceIndex slices_for(std::chrono::milliseconds time) {
  const auto bytes = static_cast<std::uint64_t>(time.count()) * kMostBytesPerMs;
  return kSmallSlices + kMiddleSlices + static_cast<SliceIndex>(bytes / TimedRead::kSliceBytes);
}

}  // namespace

TimedRead::TimedRead(boost::asio::any_io_executor executor, transport::Engine& engine,
                     const Options& options)
    : executor_(std::move(executor)),
      engine_(engine),
      options_(options),
      slices_(slices_for(options.time)),
      changed_(std::make_shared<async::Notifier>(executor_)) {
  for (std::uint64_t at = 0; at + kSliceBytes <= options_.scratch.size(); at += kSliceBytes) {
    free_slots_.push_back(options_.scratch.data() + at);
  }
}

TimedRead::~TimedRead() { batch_.reset(); }

transport::SliceInfo TimedRead::info(SliceIndex slice) const {
  transport::SliceInfo info;
  info.bytes = size_of(slice);
  info.candidates = transport::SourceMask::of(0);
  info.group_first = slice;
  info.key = slice;
  return info;
}

Result<void> TimedRead::expand(SliceIndex slice, SourceIndex, std::vector<transport::ReadOp>& out) {
  if (free_slots_.empty()) return fail(ErrorCode::kExhausted, "the scratch memory is in use");
  std::byte* const slot = free_slots_.back();
  free_slots_.pop_back();
  used_slots_[slice] = slot;
  const std::uint64_t places = options_.region_bytes / kSliceBytes;
  transport::ReadOp op;
  op.remote = options_.region;
  op.remote_offset = slice % places * kSliceBytes;
  op.local = slot;
  op.run_bytes = size_of(slice);
  out.push_back(op);
  return {};
}

void TimedRead::landed(SliceIndex slice, SourceIndex) {
  {
    const std::lock_guard lock(mutex_);
    if (counting_) {
      bytes_ += size_of(slice);
    } else {
      began_ = steady_now();
    }
  }
  free_slot(slice);
  landing_->resolve(slice, transport::Verdict::kAccept);
}

void TimedRead::dropped(SliceIndex slice, SourceIndex) { free_slot(slice); }

void TimedRead::free_slot(SliceIndex slice) {
  const auto found = used_slots_.find(slice);
  free_slots_.push_back(found->second);
  used_slots_.erase(found);
}

void TimedRead::on_source_lost(SourceIndex, const Error& cause) {
  {
    const std::lock_guard lock(mutex_);
    why_ = cause;
  }
  wake();
}

void TimedRead::on_finished(const Result<void>& outcome) {
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
    if (!outcome && !why_) why_ = outcome.error();
  }
  wake();
}

void TimedRead::wake() {
  boost::asio::post(executor_, [changed = changed_] { changed->notify(); });
}

async::Task<bool> TimedRead::read_until(TimePoint when) {
  while (steady_now() < when) {
    const bool cancelled = co_await async::is_cancelled();
    {
      const std::lock_guard lock(mutex_);
      if (cancelled || finished_ || why_) co_return false;
    }
    co_await changed_->wait_until(when);
  }
  co_return true;
}

async::Task<TimedRead::Figures> TimedRead::run(transport::Paths paths) {
  const TimePoint start = steady_now();
  const auto warm_up = std::min(kLongestWarmUp, options_.time / kWarmUpPart);
  batch_ = engine_.start(*this, *this, {});
  landing_ = batch_.get();
  batch_->add_paths(0, std::move(paths));
  (void)co_await read_until(start + warm_up);
  const auto before = batch_->progress();
  {
    const std::lock_guard lock(mutex_);
    counting_ = true;
    if (began_ == TimePoint{}) began_ = steady_now();
  }
  (void)co_await read_until(start + options_.time);
  const auto after = batch_->progress();
  Figures figures;
  {
    const std::lock_guard lock(mutex_);
    figures.bytes = bytes_;
    figures.elapsed = steady_now() - began_;
    figures.why = why_;
  }
  batch_->cancel();
  // A path that does not end is aborted by the engine. Until then it may write to the memory.
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (finished_) break;
    }
    co_await changed_->wait_until(steady_now() + kLongestWarmUp);
  }
  batch_.reset();
  std::uint64_t moved = 0;
  for (std::size_t i = 0; i < after.paths.size(); ++i) {
    const std::uint64_t then = i < before.paths.size() ? before.paths[i].bytes : 0;
    const std::uint64_t bytes = after.paths[i].bytes - then;
    moved += bytes;
    figures.paths.push_back({after.paths[i], bytes, !after.paths[i].alive});
  }
  // The progress of paths is up to 50 ms old: only their shares are taken from it.
  for (PathFigure& path : figures.paths) {
    const double share =
        moved == 0 ? 0 : static_cast<double>(path.bytes) / static_cast<double>(moved);
    path.bytes = static_cast<std::uint64_t>(share * static_cast<double>(figures.bytes));
  }
  co_return figures;
}

}  // namespace rekindle::agent
