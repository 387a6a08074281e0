#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/schedule/batch_sources.h"
#include "transport/schedule/reroute.h"
#include "transport/schedule/slice_table.h"

namespace rekindle::transport {

// Which slices may be posted while staging memory is short.
//
// Slices of one group share a buffer, from the first that is posted until all have landed. Once the
// source of the slices has run out of memory, only slices of such begun groups are posted, as they
// free memory. Everything is posted again after memory has been freed.
class StagingGate {
 public:
  StagingGate(const SliceTable& slices, Duration patience) : slices_(slices), patience_(patience) {}

  // The slice is open again, since there was no memory for it.
  void refused(SliceIndex slice, TimePoint now);
  void freed();
  // A slice of this group was posted, or is open again.
  void group_changed(const SliceInfo& info);

  // Memory is short: only next_of_begun_group() is posted.
  bool is_short() const { return short_; }
  bool nothing_may_be_posted() const { return short_ && begun_groups_.empty(); }
  // The first open slice of a begun group that `may_serve` accepts and that was not refused.
  template <typename MayServe>
  std::optional<SliceIndex> next_of_begun_group(const MayServe& may_serve) const {
    for (const SliceIndex first : begun_groups_) {
      const SliceIndex size = slices_.info(first).group_size;
      for (SliceIndex slice = first; slice < first + size; ++slice) {
        if (!slices_.is_open(slice) || refused_.contains(slice)) continue;
        if (may_serve(slice, slices_.info(slice))) return slice;
      }
    }
    return std::nullopt;
  }

  // Others may hold the memory: without slices under way the gate opens at each tick. After
  // `patience` without a change it returns the error that ends the batch.
  std::optional<Error> tick(TimePoint now);
  void forgive(Duration pause) {
    if (stuck_since_) *stuck_since_ += pause;
  }

 private:
  const SliceTable& slices_;
  const Duration patience_;
  bool short_ = false;
  std::set<SliceIndex> refused_;  // since memory is short
  // By first slice. Some slices of a begun group are open, some are not.
  std::set<SliceIndex> begun_groups_;
  // Memory is short, and no slice of this batch will free any.
  std::optional<TimePoint> stuck_since_;
};

// Which open slice a source is asked for next.
//
// Without sources that are being filled, or with keeps_order, slices are taken in the batch's
// order. With them (neighbours: pullers of the same data) the pullers trade. A neighbour is asked
// for the slices it has gained, those that the fewest neighbours hold first. A source that holds
// everything is asked for slices that no neighbour holds. So it sends each byte about once, and the
// pullers have something to give each other. Two pullers would still ask it for the same slice, as
// neither sees the other's slices in flight. Therefore each begins with its own part. The slice's
// key and the pullers' order seeds alone decide whose part a slice is in (rendezvous hashing:
// Thaler and Ravishankar, 1998).
class SlicePicker {
 public:
  SlicePicker(const SliceTable& slices, const BatchSources& sources, Reroutes& reroutes,
              const StagingGate& staging, const BatchOptions& options)
      : slices_(slices),
        sources_(sources),
        reroutes_(reroutes),
        staging_(staging),
        options_(options),
        places_(kMaxSources) {}

  // A puller with this order seed is filling the source.
  void add_neighbour(SourceIndex source, std::uint64_t order_seed);
  void candidates_added(SourceIndex source, std::span<const SliceIndex> slices);
  // The source may hold other slices than before: all slices are considered again.
  void look_again(SourceIndex source);

  std::optional<SliceIndex> pick(SourceIndex source);
  // Sources that are being filled and have a path.
  SourceMask neighbours() const { return filling_ & sources_.living(); }

 private:
  // How far the search for one source has come. Positions are those of the batch's order.
  struct Place {
    // Nothing before it is open for this source.
    SliceIndex in_order = 0;
    // Neighbours hold all open slices before it.
    SliceIndex unheld = 0;
    // Before it, slices that no neighbour holds belong to others' parts.
    SliceIndex our_part = 0;
    std::uint64_t order_seed = 0;  // of a neighbour
    // The slices that a neighbour has gained. Some may have been taken meanwhile.
    std::vector<SliceIndex> offered;
  };

  SliceIndex slice_at(SliceIndex position) const;
  bool may_take(SourceIndex source, SliceIndex slice, const SliceInfo& info) const;
  int holders(const SliceInfo& info) const { return (info.candidates & neighbours()).count(); }
  bool in_our_part(const SliceInfo& info) const;
  void notice_lost_neighbours();
  std::optional<SliceIndex> pick_in_order(SourceIndex source);
  std::optional<SliceIndex> pick_offered(SourceIndex source);
  std::optional<SliceIndex> pick_rare(SourceIndex source);
  std::optional<SliceIndex> pick_unheld(SourceIndex source, bool only_our_part);

  const SliceTable& slices_;
  const BatchSources& sources_;
  Reroutes& reroutes_;
  const StagingGate& staging_;
  const BatchOptions& options_;
  std::vector<Place> places_;  // by source
  SourceMask filling_;
  SourceMask neighbours_at_last_pick_;
};

}  // namespace rekindle::transport
