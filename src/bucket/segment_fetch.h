#pragma once

#include <memory>
#include <vector>

#include "src/bucket/pinned.h"
#include "src/bucket/pipeline.h"

namespace rekindle::bucket {

// Uploads from segments: of a copy that is here, or, as tiles verify, of one that arrives.
class SegmentFetch final : public Fetch {
 public:
  using Segments = std::vector<std::shared_ptr<const PinnedSegment>>;
  SegmentFetch(const Plan& plan, const Pinner& pinner, Segments segments, TileIndex tile_count);

  // Tiles that have verified; those told before are fine. kInternal beyond the tile count.
  Result<void> mark_ready(const TileRuns& runs);
  void mark_all_ready();
  // What is not pinned yet is read all the same, slower: others wait for it.
  void wait_for_no_pins() { waits_for_pins_ = false; }

  std::optional<std::size_t> next() override;
  // This one, when it can be filled now: false, not yet.
  bool take(std::size_t bucket);
  // The first `count` of the plan are not wanted from here.
  void skip(std::size_t count);
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;

 private:
  bool is_ready(std::size_t bucket);

  const Plan& plan_;
  const Pinner& pinner_;
  const Segments segments_;
  TileSet ready_;
  bool all_ready_ = false;
  bool waits_for_pins_ = true;
  std::vector<std::size_t> waiting_;  // buckets that were not fetched yet, in order
  std::vector<Upload> uploads_;       // of the bucket that is being queued
};

// The start of each segment in this process's memory.
std::vector<const std::byte*> data_of(const SegmentFetch::Segments& segments);

}  // namespace rekindle::bucket
