#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "recovery/planner/plan.h"
#include "recovery/swarm/have_feed.h"
#include "src/base/digest.h"

namespace rekindle::swarm {

using transport::SliceIndex;
using transport::SourceIndex;
using transport::SourceMask;

// Who can serve which slice of a plan, while sources come and while what they hold grows. A source
// whose layout covers a slice is a prospect for it; it is a candidate as soon as it holds every
// tile that the slice reads. The plan itself stays as it is. Candidates are never taken back: a
// source that is gone is the scheduler's business.
//
// Changes come from one thread; candidates(), prospects() and key() are for any. Pure.
class Availability {
 public:
  // Candidates of the plan count, except those in `growing`: they hold nothing until told.
  Availability(const planner::Plan& plan, SourceMask growing);

  // A source that the plan may not know. Returns how many slices its layout covers.
  SliceIndex add_source(SourceIndex source, const Layout& layout);
  // Tiles that it is known to hold. Returns the slices that it has become a candidate for.
  std::vector<SliceIndex> extend(SourceIndex source, const TileRuns& held);
  // It holds all of its layout from now on.
  std::vector<SliceIndex> complete(SourceIndex source);

  SourceMask candidates(SliceIndex slice) const {
    return SourceMask(candidates_[slice].load(std::memory_order_acquire));
  }
  // What pullers with other plans know the slice by, too (SliceInfo::key): the first tile it reads.
  std::uint64_t key(SliceIndex slice) const { return first_tile_[slice]; }
  SourceMask prospects(SliceIndex slice) const {
    return SourceMask(prospects_[slice].load(std::memory_order_acquire));
  }

 private:
  using Bits = std::unique_ptr<std::atomic<std::uint64_t>[]>;
  // Rows of numbers, one behind the other.
  struct Rows {
    std::vector<std::uint32_t> first;  // of each row, and one past the last
    std::vector<std::uint32_t> items;
    std::span<const std::uint32_t> row(std::uint32_t i) const {
      return std::span(items).subspan(first[i], first[i + 1] - first[i]);
    }
  };

  void index_tiles();
  const std::vector<bool>& covered_by(const Layout& layout);
  bool holds(const TileSet& held, SliceIndex slice) const;

  const planner::Plan& plan_;
  const SliceIndex slice_count_;
  Bits candidates_;
  Bits prospects_;
  std::vector<TileIndex> first_tile_;  // by slice
  Rows tiles_of_slice_;                // made when the first source is added
  Rows slices_of_tile_;
  std::map<Digest, std::vector<bool>> covered_;  // by layout
  std::map<SourceIndex, TileSet> held_;
};

}  // namespace rekindle::swarm
