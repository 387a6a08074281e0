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
                                 RangeDigester range_digester,
                                 std::shared_ptr<PullCounters> counters, std::uint32_t suspicion)
    : plan_owner_(std::move(plan)),
      destination_owner_(std::move(destination)),
      verified_(std::move(verified)),
      plan_(*plan_owner_),
      destination_(*destination_owner_),
      checkpoint_(*destination_.manifest().checkpoint),
      layout_(destination_.manifest().layout),
      digest_pool_(digest_pool),
      range_digester_(std::move(range_digester)),
      counters_(std::move(counters)),
      suspicion_(suspicion),
      staging_(kStagingBufferBytes, kStagingBuffers),
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
  transport::SourceMask candidates = plan_.candidates(slice);
  if (suspicion_ > 0 && plan_.group_size(slice) > 1)
    candidates = chosen_for_group(slice, candidates);
  return {plan_.slice_bytes(slice), candidates};
}

transport::SourceMask PlanSliceSource::chosen_for_group(SliceIndex slice,
                                                        transport::SourceMask candidates) const {
  // Only a source that holds every slice of the group can answer for all of it.
  const SliceIndex first = plan_.group_first(slice);
  transport::SourceMask common = candidates;
  for (SliceIndex i = first; i < first + plan_.group_size(slice); ++i)
    common = common & plan_.candidates(i);
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
  plan_.expand(slice, source, scratch_);

  const std::lock_guard lock(mutex_);
  std::byte* staging = nullptr;
  if (scratch_.staging_bytes > 0) {
    if (scratch_.staging_bytes > staging_.buffer_bytes()) {
      return fail(ErrorCode::kInternal, "slice {} needs {} of staging, a buffer has {}", slice,
                  format_bytes(scratch_.staging_bytes), format_bytes(staging_.buffer_bytes()));
    }
    staging = staging_.acquire();
    if (staging == nullptr) return fail(ErrorCode::kExhausted, "no staging buffer is free");
    staged_[slice] = staging;
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

void PlanSliceSource::landed(SliceIndex slice, SourceIndex source) {
  counters_->landed_bytes += plan_.slice_bytes(slice);
  verifying_.fetch_add(1, std::memory_order_relaxed);
  auto job = [self = shared_from_this(), slice, source] { self->verify(slice, source); };
  // The queue holds more than the engine has in flight; should it ever be full, verifying here only
  // slows the engine down.
  if (!digest_pool_.try_submit(job)) job();
}

void PlanSliceSource::dropped(SliceIndex slice, SourceIndex) { release_staging(slice); }

void PlanSliceSource::verify(SliceIndex slice, SourceIndex source) {
  if (plan_.group_size(slice) > 1) return verify_group(slice);
  if (plan_.kind(slice) == SliceKind::kRange) return verify_range(slice, source);

  std::byte* staging = staging_of(slice);
  Expansion expansion;
  if (staging != nullptr) plan_.expand(slice, source, expansion);
  const bool staged = plan_.kind(slice) == SliceKind::kStaged;
  if (staging != nullptr && !staged) scatter(expansion, staging);

  std::vector<TileWork> works;
  plan_.tiles(slice, works);
  bool good = true;
  for (const auto& work : works) {
    if (verify_tile(work, staged ? staging : nullptr)) continue;
    good = false;
    ++counters_->corrupt_tiles;
    log::warn("pull.tile_corrupt", "tensor", checkpoint_.tensors[work.tensor].name, "box",
              work.box.to_string(), "source", source);
    break;
  }
  if (good && staged) scatter(expansion, staging);
  if (good) {
    for (const auto& work : works) mark(work.tile);
  }
  release_staging(slice);
  finish(slice, good);
}

// Slices whose tiles are complete only together: they are accepted as they land, and the tiles are
// verified with the last of them. When a tile does not verify and the slices came from different
// sources, nobody can tell whose part was wrong: the tile stays unmarked, and the next plan of this
// pull reads it from one.
void PlanSliceSource::verify_group(SliceIndex slice) {
  const SliceIndex first = plan_.group_first(slice);
  const SliceIndex size = plan_.group_size(slice);
  bool complete = false;
  {
    const std::lock_guard lock(mutex_);
    complete = ++group_landed_[first] == size;
    if (complete) group_landed_.erase(first);
  }
  bool good = true;
  if (complete) {
    std::vector<TileWork> works;
    for (SliceIndex i = first; i < first + size; ++i) plan_.tiles(i, works);
    for (const auto& work : works) {
      if (verify_tile(work, nullptr)) {
        mark(work.tile);
        continue;
      }
      good = false;
      ++counters_->corrupt_tiles;
      log::warn("pull.tile_corrupt", "tensor", checkpoint_.tensors[work.tensor].name, "box",
                work.box.to_string(), "source", "a group of slices");
    }
  }
  const bool one_source = info(slice).candidates.count() == 1;
  if (!good) counters_->rejected_bytes += plan_.slice_bytes(slice) * (one_source ? 0 : 1);
  finish(slice, good || !one_source);
}

void PlanSliceSource::verify_range(SliceIndex slice, SourceIndex source) {
  if (std::byte* staging = staging_of(slice)) {
    Expansion expansion;
    plan_.expand(slice, source, expansion);
    scatter(expansion, staging);
  }
  std::vector<TileWork> works;
  plan_.tiles(slice, works);
  auto check = [this, self = shared_from_this(), slice, source,
                works](Result<std::vector<std::uint64_t>> digests) {
    bool good = digests && digests->size() == works.size();
    if (!digests) {
      log::warn("pull.range_digest_failed", "source", source, "error", digests.error());
    }
    for (std::size_t i = 0; good && i < works.size(); ++i)
      good = verify_part(works[i], (*digests)[i]);
    if (good) {
      for (const auto& work : works) {
        bool whole = false;
        {
          const std::lock_guard lock(mutex_);
          whole = --parts_open_[work.tile] == 0;
        }
        if (whole) mark(work.tile);
      }
    }
    release_staging(slice);
    finish(slice, good);
  };
  range_digester_(source, works, [this, check](Result<std::vector<std::uint64_t>> digests) {
    auto job = [check, digests = std::move(digests)] { check(digests); };
    if (!digest_pool_.try_submit(job)) job();
  });
}

bool PlanSliceSource::verify_tile(const TileWork& work, const std::byte* staging) const {
  const TensorInfo& info = checkpoint_.tensors[work.tensor];
  const TileGrid& grid = checkpoint_.tiles.grid(work.tensor);
  const std::uint64_t local_tile = work.tile - checkpoint_.tiles.first_tile(work.tensor);
  std::uint64_t digest = 0;
  if (staging != nullptr) {
    const std::uint64_t bytes = work.box.elements() * dtype_size_bytes(info.dtype);
    digest =
        digest_tile(info, work.tensor, grid, local_tile,
                    {staging + work.staging_offset, static_cast<std::size_t>(bytes)}, work.box);
  } else {
    const LayoutEntry* entry = entry_holding(work.tensor, work.box);
    if (entry == nullptr) return false;
    digest = digest_tile(info, work.tensor, grid, local_tile, array_of(*entry), entry->box);
  }
  return digest == checkpoint_.tile_digests[work.tile];
}

bool PlanSliceSource::verify_part(const TileWork& work, std::uint64_t expected) const {
  const TensorInfo& info = checkpoint_.tensors[work.tensor];
  const std::uint64_t local_tile = work.tile - checkpoint_.tiles.first_tile(work.tensor);
  const LayoutEntry* entry = entry_holding(work.tensor, work.box);
  if (entry == nullptr) return false;
  return digest_box(work.box, dtype_size_bytes(info.dtype), tile_seed(work.tensor, local_tile),
                    array_of(*entry), entry->box) == expected;
}

const LayoutEntry* PlanSliceSource::entry_holding(TensorIndex tensor, const Box& box) const {
  for (const auto& entry : layout_.entries_of(tensor)) {
    if (contains(entry.box, box)) return &entry;
  }
  return nullptr;
}

std::span<const std::byte> PlanSliceSource::array_of(const LayoutEntry& entry) const {
  const std::uint64_t bytes =
      entry.box.elements() * dtype_size_bytes(checkpoint_.tensors[entry.tensor].dtype);
  return destination_.segment(entry.segment).subspan(entry.offset_bytes, bytes);
}

void PlanSliceSource::mark(TileIndex tile) {
  destination_.mark_verified(tile);
  verified_->set(tile);
}

void PlanSliceSource::finish(SliceIndex slice, bool good) {
  const std::uint64_t bytes = plan_.slice_bytes(slice);
  (good ? counters_->verified_bytes : counters_->rejected_bytes) += bytes;
  {
    const std::lock_guard lock(batch_mutex_);
    if (batch_ != nullptr) batch_->resolve(slice, good ? Verdict::kAccept : Verdict::kRetry);
  }
  verifying_.fetch_sub(1, std::memory_order_release);
}

void PlanSliceSource::scatter(const Expansion& expansion, const std::byte* staging) {
  for (const auto& piece : expansion.scatter) {
    std::byte* base = destination_.segment(piece.local_segment).data() + piece.copy.dst_offset;
    for (std::uint64_t i = 0; i < piece.copy.count; ++i) {
      std::memcpy(base + i * piece.copy.dst_stride,
                  staging + piece.copy.src_offset + i * piece.copy.src_stride,
                  piece.copy.run_bytes);
    }
  }
}

std::byte* PlanSliceSource::staging_of(SliceIndex slice) const {
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(slice);
  return found == staged_.end() ? nullptr : found->second;
}

void PlanSliceSource::release_staging(SliceIndex slice) {
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(slice);
  if (found == staged_.end()) return;
  staging_.release(found->second);
  staged_.erase(found);
}

}  // namespace rekindle::pull
