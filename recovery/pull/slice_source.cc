#include "recovery/pull/slice_source.h"

#include <cstring>
#include <memory>
#include <utility>

#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::pull {

using planner::Expansion;
using planner::SliceKind;
using planner::TileWork;
using transport::ReadOp;
using transport::SliceIndex;
using transport::SourceIndex;
using transport::Verdict;

namespace {

constexpr std::size_t kStagingBufferBytes =
    8 * kMiB;  // twice a slice: covering reads at half density
constexpr std::size_t kStagingBuffers = 8;

}  // namespace

PlanSliceSource::PlanSliceSource(std::shared_ptr<const planner::Plan> plan,
                                 std::shared_ptr<store::PendingVersion> destination,
                                 std::shared_ptr<VerifiedTiles> verified, WorkerPool& digest_pool,
                                 RangeProver range_prover, std::shared_ptr<PullCounters> counters,
                                 std::uint32_t suspicion, transport::SourceMask growing)
    : plan_owner_(std::move(plan)),
      destination_owner_(std::move(destination)),
      verified_(std::move(verified)),
      plan_(*plan_owner_),
      destination_(*destination_owner_),
      checkpoint_(*destination_.manifest().checkpoint),
      layout_(destination_.manifest().layout),
      digest_pool_(digest_pool),
      range_prover_(std::move(range_prover)),
      counters_(std::move(counters)),
      suspicion_(suspicion),
      staging_(kStagingBufferBytes, kStagingBuffers),
      growing_(growing),
      availability_(plan_, growing),
      regions_(transport::kMaxSources) {
  std::vector<TileWork> works;
  for (SliceIndex slice = 0; slice < plan_.slice_count(); ++slice) {
    if (plan_.kind(slice) != SliceKind::kRange) continue;
    works.clear();
    plan_.tiles(slice, works);
    for (const auto& work : works) ++parts_open_[work.tile];
  }
}

void PlanSliceSource::bind(transport::Batch* batch) {
  const std::lock_guard lock(batch_mutex_);
  batch_ = batch;
}

void PlanSliceSource::set_regions(SourceIndex source, std::vector<transport::RegionKey> regions) {
  const std::lock_guard lock(mutex_);
  regions_[source] = std::move(regions);
}

transport::SliceInfo PlanSliceSource::info(SliceIndex slice) const {
  transport::SliceInfo info{plan_.slice_bytes(slice), availability_.candidates(slice),
                            availability_.prospects(slice)};
  info.key = availability_.key(slice);
  if (plan_.group_size(slice) == 1) return info;
  if (plan_.kind(slice) == SliceKind::kStaged) {
    info.group_first = plan_.group_first(slice);
    info.group_size = plan_.group_size(slice);
  }
  const auto chosen = suspicion_ > 0 ? chosen_for_group(slice, plan_.candidates(slice) & ~growing_)
                                     : transport::SourceMask();
  if (!chosen.empty()) {
    info.candidates = chosen;
    info.prospects = {};
  }
  return info;
}

transport::SourceMask PlanSliceSource::chosen_for_group(SliceIndex slice,
                                                        transport::SourceMask candidates) const {
  // Only a source that holds every slice of the group can answer for all of it; sources that are
  // being filled are left out: the choice must not change while the group is read.
  const SliceIndex first = plan_.group_first(slice);
  transport::SourceMask common = candidates;
  for (SliceIndex i = first; i < first + plan_.group_size(slice); ++i)
    common = common & plan_.candidates(i) & ~growing_;
  if (common.empty()) return candidates;
  auto skip = (first + suspicion_) % static_cast<std::uint32_t>(common.count());
  for (SourceIndex source = 0; source < transport::kMaxSources; ++source) {
    if (!common.test(source) || skip-- > 0) continue;
    transport::SourceMask chosen;
    chosen.set(source);
    return chosen;
  }
  return candidates;
}

Result<void> PlanSliceSource::expand(SliceIndex slice, SourceIndex source,
                                     std::vector<ReadOp>& out) {
  scratch_.reads.clear();
  scratch_.scatter.clear();
  scratch_.staging_bytes = 0;
  expand_plan(slice, source, scratch_);

  const std::lock_guard lock(mutex_);
  std::byte* staging = nullptr;
  if (scratch_.staging_bytes > 0) {
    TRY(staging, take_staging(slice, scratch_.staging_bytes));
  }
  const auto& regions = regions_[source];
  for (const auto& read : scratch_.reads) {
    if (read.remote_segment >= regions.size()) {
      return fail(ErrorCode::kInternal, "slice {} reads segment {} of a source that serves {}",
                  slice, read.remote_segment, regions.size());
    }
    std::byte* base = read.to_staging ? staging : destination_.segment(read.local_segment).data();
    out.push_back({.wr_id = 0,
                   .remote = regions[read.remote_segment],
                   .remote_offset = read.copy.src_offset,
                   .local = base + read.copy.dst_offset,
                   .run_bytes = read.copy.run_bytes,
                   .count = read.copy.count,
                   .remote_stride = read.copy.src_stride,
                   .local_stride = read.copy.dst_stride});
  }
  return {};
}

void PlanSliceSource::expand_plan(SliceIndex slice, SourceIndex source, Expansion& out) const {
  std::shared_ptr<const Layout> layout;
  {
    const std::lock_guard lock(mutex_);
    if (const auto added = added_.find(source); added != added_.end()) layout = added->second;
  }
  if (layout != nullptr) return plan_.expand_from(slice, *layout, out);
  plan_.expand(slice, source, out);
}

void PlanSliceSource::add_source(SourceIndex source, std::shared_ptr<const Layout> layout,
                                 std::uint64_t salt) {
  {
    const std::lock_guard lock(mutex_);
    added_[source] = layout;
  }
  availability_.add_source(source, *layout);
  const std::lock_guard lock(batch_mutex_);
  if (batch_ != nullptr) batch_->add_neighbour(source, salt);
}

void PlanSliceSource::extend(SourceIndex source, const swarm::TileRuns& held) {
  auto gained = availability_.extend(source, held);
  if (!gained.empty()) tell_gains(source, std::move(gained));
}

void PlanSliceSource::complete(SourceIndex source) {
  tell_gains(source, availability_.complete(source));
}

void PlanSliceSource::tell_gains(SourceIndex source, std::vector<SliceIndex> slices) {
  const std::lock_guard lock(batch_mutex_);
  if (batch_ != nullptr) batch_->candidates_added(source, std::move(slices));
}

void PlanSliceSource::landed(SliceIndex slice, SourceIndex source) {
  counters_->landed_bytes += plan_.slice_bytes(slice);
  verifying_.fetch_add(1, std::memory_order_relaxed);
  auto job = [self = shared_from_this(), slice, source] { self->verify(slice, source); };
  // The queue holds more than the engine has in flight; should it ever be full, verifying here only
  // slows the engine down.
  if (!digest_pool_.try_submit(job)) job();
}

void PlanSliceSource::dropped(SliceIndex slice, SourceIndex) {
  const std::lock_guard lock(mutex_);
  leave_staging(slice);
}

// The slices of a staged group share their staging memory: it holds what some of them have brought
// while others are still to come.
SliceIndex PlanSliceSource::staging_key(SliceIndex slice) const {
  return plan_.kind(slice) == SliceKind::kStaged ? plan_.group_first(slice) : slice;
}

Result<std::byte*> PlanSliceSource::take_staging(SliceIndex slice, std::uint64_t bytes) {
  if (bytes > staging_.buffer_bytes()) {
    return fail(ErrorCode::kInternal, "slice {} needs {} of staging, a buffer has {}", slice,
                format_bytes(bytes), format_bytes(staging_.buffer_bytes()));
  }
  Staged& staged = staged_[staging_key(slice)];
  if (staged.buffer == nullptr) staged.buffer = staging_.acquire();
  if (staged.buffer == nullptr) {
    staged_.erase(staging_key(slice));
    return fail(ErrorCode::kExhausted, "no staging buffer is free");
  }
  ++staged.slices;
  return staged.buffer;
}

void PlanSliceSource::leave_staging(SliceIndex slice) {
  const auto found = staged_.find(staging_key(slice));
  if (found == staged_.end() || --found->second.slices > 0) return;
  staging_.release(found->second.buffer);
  staged_.erase(found);
}

}  // namespace rekindle::pull
