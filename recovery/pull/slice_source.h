#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "recovery/pull/slice_verifier.h"
#include "src/base/numa_nodes.h"

namespace rekindle::pull {

// What one run of a plan works with.
struct SliceWork {
  // Of this run alone.
  std::shared_ptr<swarm::SliceCandidates> candidates;
  std::shared_ptr<store::PendingVersion> destination;
  std::shared_ptr<VerifiedTiles> verified;
  std::shared_ptr<PullCounters> counters;
};

// A plan as the engine sees it: slices become reads into the destination or into staging, and the
// slices that have landed go to the verifier. It must outlive the batch; the verifications that
// are under way at its end do not need it.
class PlanSliceSource final : public transport::SliceSource {
 public:
  PlanSliceSource(SliceWork work, WorkerPool& digest_pool, RangeProver prover);

  // The batch that hears of verdicts and gains. Null, before the batch is destroyed: later verdicts
  // are dropped.
  void bind(transport::Batch* batch) { batch_->bind(batch); }
  // Keys of a source's segments, in the order of its layout. Called before the source's paths are
  // added, and again after a reconnect. Any thread.
  void set_regions(transport::SourceIndex source, std::vector<transport::RegionKey> regions);

  // A source that is being filled, or that the plan does not know: once, after bind() and before
  // its paths are added. Then the tiles that it is known to hold; then that it holds them all.
  // `order_seed`: swarm::order_seed() the host that fills it. Control thread.
  void add_source(transport::SourceIndex source, std::shared_ptr<const Layout> layout,
                  bool proves_parts, std::uint64_t order_seed);
  void extend(transport::SourceIndex source, const swarm::TileRuns& held);
  void complete(transport::SourceIndex source);

  SliceVerifier& verifier() const { return *verifier_; }
  // The NUMA node that all of the destination lies on. -1: several, or unknown.
  int numa_node() const { return common_node(segment_nodes_); }

  transport::SliceIndex slice_count() const override;
  transport::SliceInfo info(transport::SliceIndex slice) const override;
  Result<void> expand(transport::SliceIndex slice, transport::SourceIndex source,
                      std::vector<transport::ReadOp>& out) override;
  void landed(transport::SliceIndex slice, transport::SourceIndex source) override;
  void dropped(transport::SliceIndex slice, transport::SourceIndex source) override;
  Error local_fault(transport::SliceIndex slice) override;

 private:
  void tell_gains(transport::SourceIndex source, std::vector<transport::SliceIndex> slices);

  const std::shared_ptr<store::PendingVersion> destination_;
  const std::shared_ptr<swarm::SliceCandidates> candidates_;
  const std::shared_ptr<SliceStaging> staging_;
  const std::shared_ptr<BatchLink> batch_ = std::make_shared<BatchLink>();
  const std::shared_ptr<SliceVerifier> verifier_;
  std::mutex mutex_;
  std::vector<std::vector<transport::RegionKey>> regions_;  // guarded by mutex_
  planner::Expansion scratch_;                              // engine thread only
  const std::vector<int> segment_nodes_;                    // of the destination
  // Of the last expansion of each slice; engine thread only. -1: in staging, or unknown.
  std::vector<int> slice_nodes_;
};

}  // namespace rekindle::pull
