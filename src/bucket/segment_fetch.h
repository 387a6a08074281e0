#pragma once

#include <memory>
#include <span>
#include <vector>

#include "src/bucket/pinned.h"
#include "src/bucket/pipeline.h"

namespace rekindle::bucket {

// Uploads from segments: of a copy on this host, or of a copy that still arrives, as its tiles
// verify.
class SegmentFetch final : public Fetch {
 public:
  using Segments = std::vector<std::shared_ptr<const PinnedSegment>>;
  SegmentFetch(const Plan& plan, const Pinner& pinner, Segments segments, TileIndex tile_count);

  // Tiles that have verified; they may repeat. kInternal: a tile is out of range.
  Result<void> mark_ready(const TileRuns& runs);
  void mark_all_ready();
  // Memory that is not pinned yet is read anyway, slower, because other ranks wait.
  void wait_for_no_pins() { waits_for_pins_ = false; }

  std::optional<std::size_t> next() override;
  // Takes this bucket. False: it cannot be filled yet.
  bool take(std::size_t bucket);
  // Buckets that next() has not given.
  std::size_t waiting() const { return waiting_.size(); }
  // This bucket is not needed.
  void leave_out(std::size_t bucket) { std::erase(waiting_, bucket); }
  // Gives out again, in their order, all buckets that next() gave out, but the first `count`.
  void give_again_after(std::size_t count);
  // The first `count` buckets of the plan are not needed.
  void skip(std::size_t count);
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;
  // The copies that fill the bucket at `to`. Valid until the next call.
  std::span<const Upload> uploads(std::size_t bucket, DeviceAddress to);

 private:
  bool is_ready(std::size_t bucket);

  const Plan& plan_;
  const Pinner& pinner_;
  const Segments segments_;
  TileSet ready_;
  bool all_ready_ = false;
  bool waits_for_pins_ = true;
  // Buckets that were not fetched yet, in order.
  std::vector<std::size_t> waiting_;
  // Buckets that next() gave out, in that order.
  std::vector<std::size_t> given_;
  // Of the bucket that is being queued.
  std::vector<Upload> uploads_;
};

// The start of each segment in this process's memory.
std::vector<const std::byte*> data_of(const SegmentFetch::Segments& segments);

}  // namespace rekindle::bucket
