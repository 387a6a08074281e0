#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "recovery/planner/plan.h"
#include "recovery/pull/staging_pool.h"
#include "recovery/swarm/availability.h"
#include "recovery/swarm/held_tiles.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "transport/engine.h"

namespace rekindle::pull {

// Bytes of one pull, for progress and the summary. Thread-safe.
struct PullCounters {
  std::atomic<std::uint64_t> verified_bytes = 0;  // of the plan, accepted
  std::atomic<std::uint64_t> landed_bytes = 0;    // over the wire, accepted or not
  std::atomic<std::uint64_t> rejected_bytes = 0;  // landed, did not verify
  std::atomic<std::uint64_t> corrupt_tiles = 0;
};

// The tiles of a pull that have verified, in this life or an earlier one: what it serves on.
using VerifiedTiles = swarm::HeldTiles;

// Slices that landed and did not verify.
struct WrongBytes {
  std::uint32_t slices = 0;
  std::string where;  // in the last of them: TENSOR[BOX]
};

// Asks source `source` for proofs of parts of tiles and calls back, from any thread, with one proof
// per item, or an error: kCorrupt when its own copy is bad.
using RangeProofs = Result<std::vector<std::string>>;
using RangeProver =
    std::function<void(transport::SourceIndex source, std::vector<planner::TileWork> items,
                       std::function<void(RangeProofs)> done)>;

// The bridge between a Plan and the engine: expands slices to reads into the destination (or
// staging), and verifies what has landed on the digest pool. A verified tile is marked in the
// destination's resume bitmap before its slice is accepted.
//
// Always in a shared_ptr: verifications that outlive a cancelled batch keep it (and the
// destination, whose pages they read) alive.
class PlanSliceSource final : public transport::SliceSource,
                              public std::enable_shared_from_this<PlanSliceSource> {
 public:
  PlanSliceSource(std::shared_ptr<const planner::Plan> plan,
                  std::shared_ptr<store::PendingVersion> destination,
                  std::shared_ptr<VerifiedTiles> verified, WorkerPool& digest_pool,
                  RangeProver range_prover, std::shared_ptr<PullCounters> counters,
                  std::uint32_t suspicion, transport::SourceMask growing = {});

  // Keys of a source's segments, in its layout's order. Before its paths are added; again after a
  // reconnect. Any thread.
  void set_regions(transport::SourceIndex source, std::vector<transport::RegionKey> regions);
  // Sources that are being filled (`growing`, or unknown to the plan), once the batch is bound and
  // before their paths are added; then what they are known to hold; then that they hold it all.
  // `salt`: swarm::salt_of() of the host that fills it. Control thread.
  void add_source(transport::SourceIndex source, std::shared_ptr<const Layout> layout,
                  std::uint64_t salt);
  void extend(transport::SourceIndex source, const swarm::TileRuns& held);
  void complete(transport::SourceIndex source);
  // Whom to tell verdicts; nullptr before the batch is destroyed: later verdicts are dropped.
  void bind(transport::Batch* batch);
  // True while a slice that landed has no verdict yet. Once the batch has ended and this is false,
  // nothing here touches the destination, the plan or the sources any more. Any thread.
  bool verifying() const { return verifying_.load(std::memory_order_acquire) > 0; }
  // What a source sent; nullopt: what several did together, so that nobody can tell whose is wrong.
  // Any thread.
  WrongBytes wrong_bytes(std::optional<transport::SourceIndex> source) const;

  transport::SliceIndex slice_count() const override { return plan_.slice_count(); }
  transport::SliceInfo info(transport::SliceIndex slice) const override;
  Result<void> expand(transport::SliceIndex slice, transport::SourceIndex source,
                      std::vector<transport::ReadOp>& out) override;
  void landed(transport::SliceIndex slice, transport::SourceIndex source) override;
  void dropped(transport::SliceIndex slice, transport::SourceIndex source) override;
  Error local_fault(transport::SliceIndex slice) override;

 private:
  transport::Verdict verify_tile(const planner::TileWork& work, const std::byte* staging) const;
  transport::Verdict verify_part(const planner::TileWork& work, std::string_view proof) const;
  transport::Verdict compare(const Digest& expected, const std::function<Digest()>& digest) const;
  transport::SourceMask chosen_for_group(transport::SliceIndex slice,
                                         transport::SourceMask candidates) const;
  void expand_plan(transport::SliceIndex slice, transport::SourceIndex source,
                   planner::Expansion& out) const;
  void tell_gains(transport::SourceIndex source, std::vector<transport::SliceIndex> slices);
  std::span<const std::byte> array_of(const LayoutEntry& entry) const;
  const LayoutEntry* entry_holding(TensorIndex tensor, const Box& box) const;

  // slice_verify.cc, on the digest pool
  struct RangeCheck;
  void verify(transport::SliceIndex slice, transport::SourceIndex source);
  transport::Verdict verify_tiles(transport::SliceIndex slice, transport::SourceIndex source,
                                  std::optional<transport::SourceIndex> sender);
  std::optional<transport::SourceIndex> only_source(transport::SliceIndex first,
                                                    transport::SliceIndex last) const;
  void note_wrong(const planner::TileWork& work, std::optional<transport::SourceIndex> sender);
  void verify_group(transport::SliceIndex slice, transport::SourceIndex source);
  void verify_range(transport::SliceIndex slice, transport::SourceIndex source);
  void ask_for_proofs(std::shared_ptr<RangeCheck> check, transport::SourceIndex from);
  void judge(const std::shared_ptr<RangeCheck>& check, transport::SourceIndex from,
             const RangeProofs& proofs);
  void mark(TileIndex tile);
  void mark_parts(const std::vector<planner::TileWork>& works);
  void finish(transport::SliceIndex slice, transport::Verdict verdict);
  // False: the destination cannot be written.
  bool scatter(const planner::Expansion& expansion, const std::byte* staging);
  bool scatter_own(transport::SliceIndex slice, transport::SourceIndex source);

  struct Staged {
    std::byte* buffer = nullptr;
    std::uint32_t slices = 0;  // that are read into it or lie in it
  };
  struct Group {
    std::uint32_t landed = 0;
    bool spoiled = false;  // complete, and did not verify: left to the next plan
  };
  transport::SliceIndex staging_key(transport::SliceIndex slice) const;
  std::byte* staging_of(transport::SliceIndex slice) const;
  Result<std::byte*> take_staging(transport::SliceIndex slice, std::uint64_t bytes);  // locked
  void leave_staging(transport::SliceIndex slice);                                    // locked

  const std::shared_ptr<const planner::Plan> plan_owner_;
  const std::shared_ptr<store::PendingVersion> destination_owner_;
  const std::shared_ptr<VerifiedTiles> verified_;
  const planner::Plan& plan_;
  store::PendingVersion& destination_;
  const Checkpoint& checkpoint_;
  const Layout& layout_;
  WorkerPool& digest_pool_;
  const RangeProver range_prover_;
  const std::shared_ptr<PullCounters> counters_;
  // How often tiles put together from several slices have failed in this pull. Above 0 each group
  // of slices is read from one source only, another one each time, so that a bad source shows
  // itself.
  const std::uint32_t suspicion_;
  StagingPool staging_;
  const transport::SourceMask growing_;  // in the plan, but they hold only what is said
  swarm::Availability availability_;

  std::atomic<std::uint64_t> verifying_ = 0;
  std::mutex batch_mutex_;
  transport::Batch* batch_ = nullptr;  // guarded by batch_mutex_
  mutable std::mutex mutex_;
  std::vector<std::vector<transport::RegionKey>> regions_;                 // guarded by mutex_
  std::map<transport::SourceIndex, std::shared_ptr<const Layout>> added_;  // guarded by mutex_
  std::unordered_map<transport::SliceIndex, Staged> staged_;               // guarded by mutex_
  std::unordered_map<transport::SliceIndex, Group> groups_;  // by first slice, guarded by mutex_
  std::unordered_map<TileIndex, std::uint32_t> parts_open_;  // guarded by mutex_
  std::map<std::optional<transport::SourceIndex>, WrongBytes> wrong_;  // guarded by mutex_
  planner::Expansion scratch_;                                         // engine thread only
};

}  // namespace rekindle::pull
