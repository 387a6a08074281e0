#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "recovery/planner/slice_plan.h"
#include "recovery/pull/direct_reads.h"
#include "recovery/pull/path_opener.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_metrics.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/source_plan.h"
#include "recovery/pull/source_table.h"
#include "recovery/rpc/grants.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "transport/engine.h"

namespace rekindle::pull {

// One plan for each direct bucket, as if the bucket were a segment of a copy. Immutable.
struct DirectPlan {
  struct Bucket {
    std::size_t number = 0;
    std::shared_ptr<const planner::Plan> plan;
    // Its slices follow each other, from this one on.
    transport::SliceIndex first_slice = 0;
  };
  std::vector<Bucket> buckets;
  transport::SliceIndex slices = 0;
};
// kUnavailable: some tile cannot be read whole and in place, or the tables would be too large.
// Any thread.
Result<std::shared_ptr<const DirectPlan>> plan_direct(
    std::shared_ptr<const Checkpoint> checkpoint, const std::vector<PlanSource>& sources,
    const std::vector<bucket::DirectBucket>& buckets, std::uint64_t bucket_bytes);

// The sources that serve direct reads, as indexes into the table. kUnavailable: this host has some
// of the bytes, or other hosts are being filled: it is better to trade with these.
Result<std::vector<transport::SourceIndex>> direct_sources(const SourceTable& sources);

// Reads the buckets that a session wants over verbs into its slots, one after the other. The
// session's device verifies them: a slice is accepted when its bucket has verified, and read again
// when it has a wrong tile. Reads of one bucket come from all sources. Control thread only, except
// the calls of the engine.
class DirectTransfer final : private transport::SliceSource, private transport::BatchObserver {
 public:
  struct Options {
    std::shared_ptr<const DirectPlan> plan;
    DirectSlots slots;
    // Complete peers, in the order of the plan.
    SourceTable sources;
    PathOpener::Options paths;
    // Called about every 200 ms.
    std::function<void()> tick;
    // Asks for the sources anew: they come with fresh grants. Empty: nobody is asked.
    std::function<async::Task<std::vector<proto::Source>>()> ask_again;
    // Sessions end with their grants, so they are renewed.
    std::chrono::milliseconds renew_every = rpc::grant_times().renewal;
  };
  DirectTransfer(const PullEnvironment& environment, Silence& silence, DirectReads& reads,
                 Options options);
  ~DirectTransfer() override;

  // Returns why no more is read. By then nothing writes to the slots. A cancelled coroutine ends
  // the reads; it must have been told not to throw.
  async::Task<std::string> run();
  // After run(): by source.
  const std::vector<WrongBytes>& wrong() const { return wrong_; }

 private:
  struct BucketState {
    enum class State { kWaiting, kReading, kVerified } state = State::kWaiting;
    std::uint32_t slot = 0;
    // Slices that have not landed.
    transport::SliceIndex missing = 0;
  };
  struct Landed {
    std::size_t bucket = 0;
  };
  struct SourceLost {
    transport::SourceIndex source = 0;
    std::string cause;
  };
  using Event = std::variant<Landed, SourceLost>;

  // --- the engine's thread
  transport::SliceIndex slice_count() const override { return plan_->slices; }
  transport::SliceInfo info(transport::SliceIndex slice) const override;
  Result<void> expand(transport::SliceIndex slice, transport::SourceIndex source,
                      std::vector<transport::ReadOp>& out) override;
  void landed(transport::SliceIndex slice, transport::SourceIndex source) override;
  void dropped(transport::SliceIndex, transport::SourceIndex) override {}
  Error local_fault(transport::SliceIndex slice) override;
  void on_source_lost(transport::SourceIndex source, const Error& cause) override;
  void on_starved(const transport::Starvation&) override {}
  void on_finished(const Result<void>& outcome) override;

  std::size_t bucket_of(transport::SliceIndex slice) const;
  transport::SliceIndex slices_in(std::size_t bucket) const;
  void wake();
  async::Task<void> connect(transport::SourceIndex index);
  async::Task<void> renew_sessions();
  std::optional<Result<void>> take_events();
  std::optional<std::string> reason_to_stop(bool cancelled);
  // Returns why a wish makes no sense.
  std::optional<std::string> take_wishes();
  void accept_before(std::uint64_t count);
  void assign(std::size_t bucket, std::uint32_t slot);
  bool read_again(std::size_t bucket, std::vector<TileIndex> wrong);

  const PullEnvironment& environment_;
  DirectReads& reads_;
  const std::shared_ptr<const DirectPlan> plan_;
  const DirectSlots slots_;
  SourceTable sources_;
  PathOpener opener_;
  std::vector<WrongBytes> wrong_;
  const std::function<void()> tick_;
  const std::function<async::Task<std::vector<proto::Source>>()> ask_again_;
  const std::chrono::milliseconds renew_every_;
  MovedBytes moved_;
  std::size_t accepted_ = 0;
  // Sources with paths, and why the last one has none.
  transport::SourceMask living_;
  std::string last_loss_;
  async::TaskGroup connects_;
  async::TaskGroup renewals_;
  TimePoint last_word_{};

  mutable std::mutex mutex_;
  // The rest up to `batch_` is guarded by mutex_.
  std::vector<BucketState> buckets_;
  std::vector<std::vector<transport::RegionKey>> regions_;
  // Of each slice that has landed.
  std::vector<transport::SourceIndex> senders_;
  std::deque<Event> events_;
  std::optional<Result<void>> finished_;

  planner::Expansion scratch_;  // engine thread only
  std::unique_ptr<transport::Batch> batch_;
};

}  // namespace rekindle::pull
