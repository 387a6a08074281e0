#include "recovery/pull/slice_source.h"

#include <utility>

namespace rekindle::pull {

using transport::SliceIndex;
using transport::SourceIndex;

namespace {

std::vector<int> nodes_of(const store::PendingVersion& copy) {
  std::vector<int> nodes;
  for (std::uint32_t i = 0; i < copy.manifest().layout.segments().size(); ++i) {
    nodes.push_back(copy.mapped(i)->numa_node());
  }
  return nodes;
}

}  // namespace

PlanSliceSource::PlanSliceSource(SliceWork work, WorkerPool& digest_pool, RangeProver prover)
    : destination_(work.destination),
      candidates_(work.candidates),
      staging_(std::make_shared<SliceStaging>(candidates_->plan())),
      verifier_(std::make_shared<SliceVerifier>(
          candidates_, staging_, batch_, TileVerifier(work.destination, work.verified),
          SliceVerifier::Options{digest_pool, std::move(prover), work.counters})),
      regions_(transport::kMaxSources),
      segment_nodes_(nodes_of(*destination_)),
      slice_nodes_(slice_count(), -1) {}

void PlanSliceSource::set_regions(SourceIndex source, std::vector<transport::RegionKey> regions) {
  const std::lock_guard lock(mutex_);
  regions_[source] = std::move(regions);
}

void PlanSliceSource::add_source(SourceIndex source, std::shared_ptr<const Layout> layout,
                                 bool proves_parts, std::uint64_t order_seed) {
  candidates_->add_source(source, std::move(layout), proves_parts);
  batch_->tell([&](transport::Batch& batch) { batch.add_neighbour(source, order_seed); });
}

void PlanSliceSource::extend(SourceIndex source, const swarm::TileRuns& held) {
  auto gained = candidates_->extend(source, held);
  if (!gained.empty()) tell_gains(source, std::move(gained));
}

void PlanSliceSource::complete(SourceIndex source) {
  tell_gains(source, candidates_->complete(source));
}

void PlanSliceSource::tell_gains(SourceIndex source, std::vector<SliceIndex> slices) {
  batch_->tell([&](transport::Batch& batch) { batch.candidates_added(source, std::move(slices)); });
}

SliceIndex PlanSliceSource::slice_count() const { return candidates_->plan().slice_count(); }

transport::SliceInfo PlanSliceSource::info(SliceIndex slice) const {
  return candidates_->info(slice);
}

Result<void> PlanSliceSource::expand(SliceIndex slice, SourceIndex source,
                                     std::vector<transport::ReadOp>& out) {
  scratch_.reads.clear();
  scratch_.scatter.clear();
  scratch_.staging_bytes = 0;
  candidates_->expand(slice, source, scratch_);
  std::byte* staging = nullptr;
  if (scratch_.staging_bytes > 0) {
    TRY(staging, staging_->take(slice, scratch_.staging_bytes));
  }
  const bool in_place = staging == nullptr && !scratch_.reads.empty();
  slice_nodes_[slice] = in_place ? segment_nodes_[scratch_.reads.front().local_segment] : -1;
  const std::lock_guard lock(mutex_);
  const auto& regions = regions_[source];
  for (const auto& read : scratch_.reads) {
    if (read.remote_segment >= regions.size()) {
      return fail(ErrorCode::kInternal, "slice {} reads segment {} of a source that serves {}",
                  slice, read.remote_segment, regions.size());
    }
    std::byte* const base =
        staging != nullptr ? staging : destination_->segment(read.local_segment).data();
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

void PlanSliceSource::landed(SliceIndex slice, SourceIndex source) {
  verifier_->landed(slice, source, slice_nodes_[slice]);
}

void PlanSliceSource::dropped(SliceIndex slice, SourceIndex) { staging_->leave(slice); }

Error PlanSliceSource::local_fault(SliceIndex) { return destination_->access_error(); }

}  // namespace rekindle::pull
