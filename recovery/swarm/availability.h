#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "recovery/planner/slice_plan.h"
#include "recovery/swarm/have_feed.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "transport/engine.h"

namespace rekindle::swarm {

using transport::SliceIndex;
using transport::SourceIndex;
using transport::SourceMask;

// Rows of numbers, one after the other.
struct Rows {
  // The index of the first item of each row, and one past the last item.
  std::vector<std::uint32_t> first;
  std::vector<std::uint32_t> items;
  std::span<const std::uint32_t> row(std::uint32_t i) const {
    return std::span(items).subspan(first[i], first[i + 1] - first[i]);
  }
};

// The tiles that each slice of a plan reads, and the same the other way round.
struct SliceTiles {
  Rows tiles_of_slice;
  Rows slices_of_tile;
  static std::shared_ptr<const SliceTiles> of(const planner::Plan& plan);
};

// What takes long when a source with this layout joins a plan. Any thread may make it.
struct JoinTables {
  Digest layout;
  bool proves_parts = false;
  // By slice: Plan::covered_by().
  std::vector<bool> covered;
  std::shared_ptr<const SliceTiles> tiles;
};
// `tiles`: of this plan, from earlier tables. Null: they are made, too.
JoinTables join_tables(const planner::Plan& plan, const Layout& layout, bool proves_parts,
                       std::shared_ptr<const SliceTiles> tiles);

// The sources that can serve each slice of a plan, while sources come and their copies grow. A
// source that covers a slice (Plan::covered_by) is a prospect for it; it is a candidate as soon as
// it holds every tile that the slice reads. The plan itself does not change. A candidate stays one:
// the scheduler notices when a source is gone.
//
// One thread makes the changes; any thread may call candidates(), prospects() and key(). Pure.
class Availability {
 public:
  // Candidates of the plan count, except those in `growing`: extend() says what they hold.
  Availability(const planner::Plan& plan, SourceMask growing);

  // Before a source with this layout is added. Without it add_source() makes the tables itself.
  void prepare(JoinTables tables);
  // Null: no source was added or prepared.
  const std::shared_ptr<const SliceTiles>& slice_tiles() const { return tiles_; }
  // The plan need not know the source. Returns the number of slices that it covers.
  SliceIndex add_source(SourceIndex source, const Layout& layout, bool proves_parts);
  // The source holds these tiles. Returns the slices that it has become a candidate for.
  std::vector<SliceIndex> extend(SourceIndex source, const TileRuns& held);
  // The source holds all of its layout from now on.
  std::vector<SliceIndex> complete(SourceIndex source);

  SourceMask candidates(SliceIndex slice) const { return candidates_[slice].load(); }
  // The name of the slice among pullers with different plans (SliceInfo::key): the first tile that
  // it reads.
  std::uint64_t key(SliceIndex slice) const { return first_tile_[slice]; }
  SourceMask prospects(SliceIndex slice) const { return prospects_[slice].load(); }

 private:
  // A mask that one thread adds sources to while others read it.
  class GrowingMask {
   public:
    SourceMask load() const {
      SourceMask mask;
      for (std::size_t i = 0; i < SourceMask::kWords; ++i) {
        mask.set_word(i, words_[i].load(std::memory_order_acquire));
      }
      return mask;
    }
    void add(const SourceMask& more) {
      for (std::size_t i = 0; i < SourceMask::kWords; ++i) {
        if (more.word(i) != 0) words_[i].fetch_or(more.word(i), std::memory_order_release);
      }
    }

   private:
    std::array<std::atomic<std::uint64_t>, SourceMask::kWords> words_{};
  };
  using Masks = std::unique_ptr<GrowingMask[]>;
  bool holds(const TileSet& held, SliceIndex slice) const;

  const planner::Plan& plan_;
  const SliceIndex slice_count_;
  Masks candidates_;
  Masks prospects_;
  // By slice.
  std::vector<TileIndex> first_tile_;
  std::shared_ptr<const SliceTiles> tiles_;
  // By layout and proves_parts.
  std::map<std::pair<Digest, bool>, std::vector<bool>> covered_;
  std::map<SourceIndex, TileSet> held_;
};

// The seed of a puller's order, from its incarnation.
std::uint64_t order_seed(const Incarnation& incarnation);

// Each slice once, bucket by bucket. Every seed gives another order of the buckets: pullers of the
// same version fetch different parts of it first and have something to give each other. The slices
// of a bucket stay together, and so do those of a group.
std::vector<transport::SliceIndex> slice_order(const planner::Plan& plan, std::uint64_t seed);

// Which sources may bring which slice of a plan, and by which reads. Sources that are being filled
// join while the plan runs, and are candidates for the slices that they hold by then. The control
// thread makes the changes; any thread may ask.
class SliceCandidates {
 public:
  // `growing`: sources of the plan that hold nothing until extend() or complete() says so.
  // `suspicion`: how often tiles of several sources have failed together in this pull. Above 0 the
  // candidates of each group of slices are one source only, and another one each time: this exposes
  // a bad source.
  SliceCandidates(std::shared_ptr<const planner::Plan> plan, transport::SourceMask growing,
                  std::uint32_t suspicion);

  const planner::Plan& plan() const { return *plan_; }
  const std::shared_ptr<const planner::Plan>& shared_plan() const { return plan_; }

  // See Availability. Control thread, or before any other thread uses this object.
  void prepare(JoinTables tables) { availability_.prepare(std::move(tables)); }
  const std::shared_ptr<const SliceTiles>& slice_tiles() const {
    return availability_.slice_tiles();
  }
  // A source that the plan may not know. It holds nothing yet.
  void add_source(transport::SourceIndex source, std::shared_ptr<const Layout> layout,
                  bool proves_parts);
  // Both return the slices that the source has become a candidate for.
  std::vector<transport::SliceIndex> extend(transport::SourceIndex source, const TileRuns& held);
  std::vector<transport::SliceIndex> complete(transport::SourceIndex source);

  transport::SliceInfo info(transport::SliceIndex slice) const;
  void expand(transport::SliceIndex slice, transport::SourceIndex source,
              planner::Expansion& out) const;
  // The source that alone can have brought all slices from `first` to `last`.
  std::optional<transport::SourceIndex> only_source(transport::SliceIndex first,
                                                    transport::SliceIndex last) const;

 private:
  transport::SourceMask chosen_for_group(transport::SliceIndex slice) const;

  const std::shared_ptr<const planner::Plan> plan_;
  const transport::SourceMask growing_;
  const std::uint32_t suspicion_;
  Availability availability_;
  mutable std::mutex mutex_;
  std::map<transport::SourceIndex, std::shared_ptr<const Layout>> added_;  // guarded by mutex_
};

}  // namespace rekindle::swarm
