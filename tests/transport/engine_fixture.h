#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/transport/fake/fake_transport.h"
#include "tests/transport/transport_fixture.h"
#include "transport/engine.h"

// A batch over fake peers: its slices, its sources and its events.
namespace rekindle::transport::testing {

// Slices of equal size, one behind the other in one region; some ops of a slice are strided. It
// verifies by comparing, on the engine thread, and checks that the engine keeps its contract.
class TestSlices final : public SliceSource {
 public:
  TestSlices(SliceIndex count, std::uint64_t slice_bytes)
      : segment_(std::max<std::uint64_t>(count * slice_bytes, 8)),
        slice_bytes_(slice_bytes),
        local_(count * slice_bytes),
        expanded_(count) {}

  void set_batch(Batch* batch) {
    const std::lock_guard lock(mutex_);
    batch_ = batch;
    for (const auto& [slice, verdict] : early_) batch_->resolve(slice, verdict);
    early_.clear();
  }
  void set_region(SourceIndex source, RegionKey key) {
    const std::lock_guard lock(mutex_);
    keys_[source] = key;
  }

  SliceIndex slice_count() const override { return static_cast<SliceIndex>(expanded_.size()); }
  SliceInfo info(SliceIndex slice) const override {
    return {slice_bytes_, candidates ? candidates(slice) : SourceMask(~0ull)};
  }
  Result<void> expand(SliceIndex slice, SourceIndex source, std::vector<ReadOp>& out) override {
    const std::lock_guard lock(mutex_);
    if (staging_left == 0) return fail(ErrorCode::kExhausted, "no staging");
    if (staging_left > 0) --staging_left;
    if (std::exchange(expanded_[slice], 1) != 0) ++double_writes;
    const std::uint64_t at = slice * slice_bytes_;
    const std::uint64_t half = slice_bytes_ / 2;
    ReadOp first{.remote = keys_.at(source), .remote_offset = at, .local = local_.data() + at};
    first.run_bytes = half;
    ReadOp rest = first;
    rest.remote_offset += half;
    rest.local += half;
    rest.run_bytes = slice_bytes_ - half;
    if (rest.run_bytes % 4 == 0) {
      rest.count = 4;
      rest.run_bytes /= 4;
      rest.remote_stride = rest.local_stride = rest.run_bytes;
    }
    out.push_back(first);
    out.push_back(rest);
    return {};
  }
  void landed(SliceIndex slice, SourceIndex source) override {
    const std::lock_guard lock(mutex_);
    release(slice);
    const Verdict verdict =
        scripted_verdict.value_or(holds(slice) ? Verdict::kAccept : Verdict::kRetry);
    if (verdict == Verdict::kRetry) ++rejected;
    if (verdict == Verdict::kAccept) ++accepted_from[source];
    if (on_landed) on_landed(slice, source);
    if (hold_verdicts) {
      held.emplace_back(slice, verdict);
    } else if (batch_ != nullptr) {
      batch_->resolve(slice, verdict);
    } else {
      early_.emplace_back(slice, verdict);
    }
  }
  void dropped(SliceIndex slice, SourceIndex) override {
    const std::lock_guard lock(mutex_);
    release(slice);
    ++drops;
  }

  bool complete() const {
    return std::memcmp(local_.data(), segment_.bytes().data(), local_.size()) == 0;
  }
  std::uint64_t outstanding() const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::uint64_t>(std::count(expanded_.begin(), expanded_.end(), 1));
  }
  const TestSegment& segment() const { return segment_; }
  std::vector<std::byte>& local() { return local_; }

  // Set before the batch starts; counters are read after it has finished.
  std::function<SourceMask(SliceIndex)> candidates;
  std::function<void(SliceIndex, SourceIndex)> on_landed;
  std::optional<Verdict> scripted_verdict;
  bool hold_verdicts = false;
  std::vector<std::pair<SliceIndex, Verdict>> held;
  int staging_left = -1;  // -1: no bound
  std::uint64_t double_writes = 0;
  std::uint64_t rejected = 0;
  std::uint64_t drops = 0;
  std::map<SourceIndex, std::uint64_t> accepted_from;

 private:
  bool holds(SliceIndex slice) const {
    const std::uint64_t at = slice * slice_bytes_;
    return std::memcmp(local_.data() + at, segment_.bytes().data() + at, slice_bytes_) == 0;
  }
  void release(SliceIndex slice) {
    expanded_[slice] = 0;
    if (staging_left >= 0) ++staging_left;
  }

  const TestSegment segment_;
  const std::uint64_t slice_bytes_;
  std::vector<std::byte> local_;
  mutable std::mutex mutex_;
  std::vector<char> expanded_;                         // guarded by mutex_
  std::map<SourceIndex, RegionKey> keys_;              // guarded by mutex_
  Batch* batch_ = nullptr;                             // guarded by mutex_
  std::vector<std::pair<SliceIndex, Verdict>> early_;  // landed before set_batch()
};

class TestObserver final : public BatchObserver {
 public:
  void on_source_lost(SourceIndex source, const Error& cause) override {
    const std::lock_guard lock(mutex_);
    lost_.emplace_back(source, cause);
    changed_.notify_all();
  }
  void on_starved(const Starvation& starvation) override {
    const std::lock_guard lock(mutex_);
    starved_.push_back(starvation);
    changed_.notify_all();
  }
  void on_finished(const Result<void>& outcome) override {
    const std::lock_guard lock(mutex_);
    if (before_finish) before_finish();
    ++finishes_;
    outcome_ = outcome;
    changed_.notify_all();
  }

  // The outcome. A batch that does not end by the test's deadline is a failure with that text.
  Result<void> wait() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kTestDeadline, [this] { return finishes_ > 0; })) {
      return fail(ErrorCode::kInternal, "the batch did not finish");
    }
    return *outcome_;
  }
  bool finished() const {
    const std::lock_guard lock(mutex_);
    return finishes_ > 0;
  }
  int finishes() const {
    const std::lock_guard lock(mutex_);
    return finishes_;
  }
  std::vector<std::pair<SourceIndex, Error>> lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
  }
  std::vector<Starvation> starved() const {
    const std::lock_guard lock(mutex_);
    return starved_;
  }
  std::function<void()> before_finish;  // on the engine thread

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<SourceIndex, Error>> lost_;
  std::vector<Starvation> starved_;
  int finishes_ = 0;
  std::optional<Result<void>> outcome_;
};

// One batch and its peers. The batch ends before its peers and its slices.
class TestRun {
 public:
  TestRun(Engine& engine, SliceIndex count, std::uint64_t slice_bytes)
      : engine_(engine), slices(count, slice_bytes) {}

  // Adds a peer that serves the whole region under the next source index. It is not connected yet.
  fake::FakePeer& add_peer() {
    const auto index = static_cast<SourceIndex>(peers_.size());
    peers_.push_back(std::make_unique<fake::FakePeer>("peer" + std::to_string(index)));
    const RegionKey key = peers_.back()->add_region(slices.segment().bytes());
    tokens_.push_back(peers_.back()->admit({key}));
    slices.set_region(index, key);
    keys_.push_back(key);
    return *peers_.back();
  }
  fake::FakePeer& peer(SourceIndex index) { return *peers_[index]; }
  void start(const BatchOptions& options = {}) {
    batch = engine_.start(slices, observer, options);
    slices.set_batch(batch.get());
  }
  void connect(SourceIndex index, const fake::Script& script = {}, int paths = 2) {
    std::vector<std::unique_ptr<Path>> made;
    for (int i = 0; i < paths; ++i) {
      made.push_back(std::move(*peers_[index]->connect(tokens_[index], script, &ledger)));
    }
    batch->add_paths(index, std::move(made));
  }
  fake::FakePeer& add_source(const fake::Script& script = {}, int paths = 2) {
    auto& added = add_peer();
    connect(static_cast<SourceIndex>(peers_.size() - 1), script, paths);
    return added;
  }
  const SessionToken& token(SourceIndex index) const { return tokens_[index]; }
  RegionKey key(SourceIndex index) const { return keys_[index]; }

  // The batch has succeeded: the right bytes, one writer at a time, nothing outstanding.
  void expect_complete() {
    const auto outcome = observer.wait();
    EXPECT_TRUE(outcome) << outcome.error().message();
    expect_drained();
    EXPECT_TRUE(slices.complete());
    EXPECT_EQ(batch->progress().slices_done, slices.slice_count());
  }
  void expect_drained() {
    EXPECT_EQ(observer.finishes(), 1);
    EXPECT_EQ(ledger.conflicts(), 0u);
    EXPECT_EQ(slices.double_writes, 0u);
    EXPECT_EQ(slices.outstanding(), 0u);
    EXPECT_EQ(batch->progress().bytes_in_flight, 0u);
  }

  fake::WriterLedger ledger;

 private:
  Engine& engine_;

 public:
  TestSlices slices;
  TestObserver observer;

 private:
  std::vector<std::unique_ptr<fake::FakePeer>> peers_;
  std::vector<SessionToken> tokens_;
  std::vector<RegionKey> keys_;

 public:
  std::unique_ptr<Batch> batch;  // last: it ends first
};

}  // namespace rekindle::transport::testing
