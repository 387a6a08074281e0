#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/joint_plan.h"

namespace rekindle::joint {

// Reads one host's part of a joint publication, which nobody can write to any more: the leaves of
// whole tiles, the pieces of shared ones, and the digests that the copy keeps of parts of tiles.
// The calls block. kInternal, kCorrupt: bytes cannot be read.
class PartReader {
 public:
  // Both outlive it. `host`: its place in the plan.
  PartReader(const store::SegmentStore& store, WorkerPool& digest_pool, const ModelVersion& id,
             std::shared_ptr<const JointPlan> plan, std::uint32_t host,
             std::shared_ptr<store::SegmentStore::StagedPart> part, Layout layout);

  const JointPlan::HostTiles& tiles() const { return tiles_; }
  const Layout& layout() const { return layout_; }
  // One for each of tiles().whole.
  Result<std::vector<Digest>> leaves() const;
  // Ascending: of the tiles that the layout does not hold whole.
  Result<std::vector<PartDigest>> part_digests() const;
  // The pieces of this host's cells of each of the tiles, joined.
  Result<std::vector<std::string>> pieces(std::span<const TileIndex> tiles) const;

 private:
  std::span<const std::byte> array(const LayoutEntry& entry) const;
  Result<std::string> pieces_of(TileIndex tile) const;
  // body(i) returns Result<void>; runs on the pool, for 0 ≤ i < count.
  template <typename Body>
  Result<void> for_each(std::size_t count, const Body& body) const;

  const store::SegmentStore& store_;
  WorkerPool& digest_pool_;
  const std::shared_ptr<const JointPlan> plan_;
  const std::uint32_t host_;
  const std::shared_ptr<store::SegmentStore::StagedPart> part_;
  const Layout layout_;
  const JointPlan::HostTiles tiles_;
  // Without leaves and root, which are not known yet.
  const Checkpoint checkpoint_;
};

}  // namespace rekindle::joint
