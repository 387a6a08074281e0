// The engine's costs: memory is O(in flight), and threads of the data path do not allocate.
#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/support/allocation_meter.h"
#include "tests/transport/transport_fixture.h"
#include "transport/engine.h"

namespace rekindle::transport::testing {
namespace {

namespace allocations = rekindle::testing::allocations;

constexpr std::uint64_t kSliceBytes = 2 * kMiB;
constexpr auto kSlices = static_cast<SliceIndex>(500'000'000'000 / kSliceBytes);
constexpr SourceIndex kSources = 4;
constexpr std::size_t kPathsPerSource = 2;
constexpr std::size_t kOpsPerSlice = 2;

struct PollerCost {
  std::atomic<std::uint64_t> allocations = 0;
  std::atomic<std::uint64_t> turns = 0;
};

// Completes its ops without moving a byte, and watches its poller's allocations.
class NullPath final : public Path {
 public:
  explicit NullPath(PollerCost& cost) : cost_(cost) {}

  Result<std::size_t> post(std::span<const ReadOp> ops) override {
    if (aborted_) return fail(ErrorCode::kPeerLost, "aborted");
    std::size_t taken = 0;
    while (taken < ops.size() && count_ < ring_.size()) {
      ring_[(head_ + count_++) % ring_.size()] = ops[taken].wr_id;
      landed_ += ops[taken++].total_bytes();
    }
    note();
    return taken;
  }
  std::size_t poll(std::span<Completion> out) override {
    std::size_t filled = 0;
    while (filled < out.size() && count_ > 0) {
      out[filled++] = {ring_[head_++ % ring_.size()], OpStatus::kOk};
      --count_;
    }
    note();
    return filled;
  }
  void abort() override { aborted_ = true; }
  std::size_t in_flight() const override { return count_; }
  std::uint64_t bytes_landed() const override { return landed_; }
  int wait_fd() const override { return -1; }
  std::string_view transport() const override { return "null"; }
  std::string describe() const override { return "null"; }

 private:
  // Counts this poller's allocations since its last visit to any path.
  void note() {
    thread_local std::optional<std::uint64_t> seen;
    const std::uint64_t now = allocations::by_this_thread();
    if (seen) cost_.allocations.fetch_add(now - *seen, std::memory_order_relaxed);
    cost_.turns.fetch_add(1, std::memory_order_relaxed);
    seen = now;
  }

  PollerCost& cost_;
  std::array<std::uint64_t, 64> ring_{};
  std::size_t head_ = 0;
  std::size_t count_ = 0;
  std::uint64_t landed_ = 0;
  bool aborted_ = false;
};

// Half a terabyte that does not exist.
class HugePlan final : public SliceSource, public BatchObserver {
 public:
  SliceIndex slice_count() const override { return kSlices; }
  SliceInfo info(SliceIndex) const override {
    return {kSliceBytes, SourceMask((1 << kSources) - 1)};
  }
  Result<void> expand(SliceIndex, SourceIndex, std::vector<ReadOp>& out) override {
    if (++expanded_ == kSlices / 10) warm_ = allocations::by_this_thread();
    for (std::size_t i = 0; i < kOpsPerSlice; ++i) {
      out.push_back({.run_bytes = kSliceBytes / kOpsPerSlice});
    }
    return {};
  }
  void landed(SliceIndex slice, SourceIndex) override {
    batch.load()->resolve(slice, Verdict::kAccept);
  }
  void dropped(SliceIndex, SourceIndex) override {}

  void on_source_lost(SourceIndex, const Error&) override {}
  void on_starved(const Starvation&) override {}
  void on_finished(const Result<void>& outcome) override {
    const std::lock_guard lock(mutex_);
    engine_allocations = allocations::by_this_thread() - warm_;
    outcome_ = outcome;
    ended_.notify_all();
  }
  Result<void> wait() {
    std::unique_lock lock(mutex_);
    if (!ended_.wait_for(lock, std::chrono::minutes(5), [this] { return outcome_.has_value(); })) {
      return fail(ErrorCode::kTimeout, "the batch did not end");
    }
    return *outcome_;
  }

  std::atomic<Batch*> batch = nullptr;
  std::uint64_t engine_allocations = 0;  // in the last nine tenths

 private:
  SliceIndex expanded_ = 0;
  std::uint64_t warm_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::optional<Result<void>> outcome_;  // guarded by mutex_
};

TEST(EngineMemory, HalfATerabyteInTwoMebibyteSlicesNeedsLittleMemoryAndNoAllocationPerSlice) {
  PollerCost pollers;
  allocations::reset_peak();
  const std::int64_t before = allocations::live_bytes();
  HugePlan plan;
  const auto engine = Engine::create({.poller_threads = 2});
  const auto batch = engine->start(plan, plan, {});
  plan.batch = batch.get();
  for (SourceIndex source = 0; source < kSources; ++source) {
    std::vector<std::unique_ptr<Path>> paths;
    for (std::size_t i = 0; i < kPathsPerSource; ++i) {
      paths.push_back(std::make_unique<NullPath>(pollers));
    }
    batch->add_paths(source, std::move(paths));
  }
  const auto outcome = plan.wait();
  ASSERT_TRUE(outcome) << outcome.error().message();
  EXPECT_EQ(batch->progress().slices_done, kSlices);
  const std::int64_t peak = allocations::peak_bytes() - before;
  RecordProperty("peak_bytes", std::to_string(peak));
  RecordProperty("poller_allocations", std::to_string(pollers.allocations));
  RecordProperty("engine_allocations", std::to_string(plan.engine_allocations));
  EXPECT_LT(peak, static_cast<std::int64_t>(64 * kMiB));
  EXPECT_LT(peak, static_cast<std::int64_t>(kSlices) * 8 + static_cast<std::int64_t>(8 * kMiB))
      << "a few bytes per open slice, and what is in flight";
  EXPECT_GT(pollers.turns, kSlices / 10);
  // The tables of a path grow with its window, and then no more.
  EXPECT_LT(pollers.allocations, 32 * kSources * kPathsPerSource);
  // The engine's thread takes a snapshot of the progress 20 times a second, however much it moves.
  EXPECT_LT(plan.engine_allocations, kSlices / 10);
}

}  // namespace
}  // namespace rekindle::transport::testing
