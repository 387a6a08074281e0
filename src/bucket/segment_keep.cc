#include "src/bucket/segment_keep.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "src/base/log.h"

namespace rekindle::bucket {

namespace {

std::uint64_t reach_of(const SegmentCopy& copy) {
  return (copy.rows - 1) * copy.from_stride + copy.run_bytes;
}

}  // namespace

bool Allowance::has_room(std::uint64_t bytes, TimePoint now) const {
  if (bytes_per_second_ == 0 || now < begin_) return false;
  const double elapsed = std::chrono::duration<double>(now - begin_).count();
  const double allowed = elapsed * static_cast<double>(bytes_per_second_);
  return static_cast<double>(taken_) + static_cast<double>(bytes) <= allowed;
}

bool Allowance::take(std::uint64_t bytes, TimePoint now) {
  if (!has_room(bytes, now)) return false;
  taken_ += bytes;
  return true;
}

SegmentKeep::SegmentKeep(Device& device, const RoundPlan& plan, const Pinner& pinner,
                         SegmentFetch::Segments segments, TileSet final_tiles, Which which,
                         Limits limits, std::uint32_t slots)
    : device_(device),
      plan_(plan),
      pinner_(pinner),
      segments_(std::move(segments)),
      final_tiles_(std::move(final_tiles)),
      which_(which),
      limits_(limits),
      slots_(slots) {}

Result<void> SegmentKeep::start() {
  TRY(stream_, device_.make_stream());
  for (Slot& slot : slots_) {
    TRY(slot.copied, device_.make_event());
  }
  return {};
}

// Memory that is not pinned would block the thread that queues the copy.
bool SegmentKeep::fits(std::uint32_t share, std::size_t bucket, std::uint64_t& bytes) const {
  const Plan& plan = plan_.plan_of(share);
  if (bucket >= plan.size()) return false;
  for (const auto& [begin, end] : plan.tiles(bucket)) {
    for (TileIndex tile = begin; tile < end; ++tile) {
      if (tile >= final_tiles_.size() || final_tiles_.test(tile)) return false;
    }
  }
  bytes = 0;
  for (const SegmentCopy& copy : plan.copies(bucket)) {
    const PinnedSegment& segment = *segments_[copy.segment];
    if (segment.writable() == nullptr) return false;
    if (!pinner_.pinned(segment, copy.from, reach_of(copy))) return false;
    bytes += copy.rows * copy.run_bytes;
  }
  return bytes > 0;
}

// Shares that do not fit are left out.
std::vector<std::uint32_t> SegmentKeep::shares_to_keep(std::size_t bucket,
                                                       std::uint64_t& bytes) const {
  bytes = 0;
  std::vector<std::uint32_t> shares;
  for (std::uint32_t share = 0; share < plan_.shares(); ++share) {
    std::uint64_t more = 0;
    if (!fits(share, bucket, more)) continue;
    shares.push_back(share);
    bytes += more;
  }
  return shares;
}

Result<void> SegmentKeep::offer(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                                TimePoint now) {
  if (limits_.link) limits_.link->allowance.use(limits_.link->passing_bytes);
  if (failed_ || which_.count == 0 || bucket % which_.count != which_.index) return {};
  std::uint64_t bytes = 0;
  auto shares = shares_to_keep(bucket, bytes);
  if (shares.empty() || !take(bytes, now)) return {};
  downloads_.clear();
  for (const std::uint32_t share : shares) {
    const Plan& plan = plan_.plan_of(share);
    const DeviceAddress from = at + share * plan_.share_bytes();
    for (const SegmentCopy& copy : plan.copies(bucket)) {
      downloads_.push_back({from + copy.at, segments_[copy.segment]->writable() + copy.from,
                            copy.run_bytes, copy.rows, copy.to_stride, copy.from_stride});
    }
  }
  auto queued = stream_->download(downloads_);
  if (queued) queued = stream_->record(*slots_[slot].copied);
  // The round goes on. Its own calls find other failures of the device.
  if (!queued) {
    failed_ = true;
    log::warn("device.keep", "device", device_.id(), "error", queued.error());
    return {};
  }
  slots_[slot].kept = Kept{bucket, std::move(shares)};
  slots_[slot].bytes = bytes;
  return {};
}

bool SegmentKeep::take(std::uint64_t bytes, TimePoint now) {
  if (limits_.link && !limits_.link->allowance.has_room(bytes, now)) return false;
  if (!limits_.kept.take(bytes, now)) return false;
  if (limits_.link) limits_.link->allowance.use(bytes);
  return true;
}

void SegmentKeep::land(std::uint32_t slot) {
  Slot& done = slots_[slot];
  landed_.push_back(*std::exchange(done.kept, std::nullopt));
  kept_bytes_ += done.bytes;
}

Result<bool> SegmentKeep::done(std::uint32_t slot) {
  if (!slots_[slot].kept) return true;
  TRY(const bool copied, device_.is_done(*slots_[slot].copied));
  if (copied) land(slot);
  return copied;
}

Result<void> SegmentKeep::drain(TimePoint deadline) {
  TRY_VOID(stream_->finish(deadline));
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    TRY(const bool copied, done(slot));
    if (!copied) return fail(ErrorCode::kInternal, "{} is done before its copies", device_.name());
  }
  return {};
}

std::vector<KeptTiles> SegmentKeep::kept() const {
  if (landed_.empty()) return {};
  std::vector<KeptTiles> of_tile(final_tiles_.size());
  const auto count = [&](std::uint32_t share, std::size_t bucket, std::uint32_t KeptTiles::*which) {
    for (const auto& [begin, end] : plan_.plan_of(share).tiles(bucket)) {
      for (TileIndex tile = begin; tile < end; ++tile) ++(of_tile[tile].*which);
    }
  };
  for (std::uint32_t share = 0; share < plan_.shares(); ++share) {
    const std::size_t buckets = plan_.plan_of(share).size();
    for (std::size_t bucket = 0; bucket < buckets; ++bucket) count(share, bucket, &KeptTiles::of);
  }
  for (const auto& [bucket, shares] : landed_) {
    for (const std::uint32_t share : shares) count(share, bucket, &KeptTiles::parts);
  }
  std::vector<KeptTiles> runs;
  for (TileIndex tile = 0; tile < of_tile.size(); ++tile) {
    const KeptTiles& one = of_tile[tile];
    if (one.parts == 0) continue;
    const bool goes_on = !runs.empty() && runs.back().end == tile &&
                         runs.back().parts == one.parts && runs.back().of == one.of;
    if (!goes_on) runs.push_back({tile, tile, one.parts, one.of});
    ++runs.back().end;
  }
  return runs;
}

}  // namespace rekindle::bucket
