#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "transport/schedule/batch_sources.h"
#include "transport/schedule/reroute.h"
#include "transport/schedule/slice_table.h"
#include "transport/schedule/staging_gate.h"

namespace rekindle::transport {

// Which open slice a source is asked for next.
//
// Without sources that are being filled, slices are taken in the batch's order. With them
// (neighbours: pullers of the same data) the pullers trade. A neighbour is asked for the slices it
// has gained, those that the fewest neighbours hold first. A source that holds everything is asked
// for slices that no neighbour holds. So it sends each byte about once, and the pullers have
// something to give each other. Two pullers would still ask it for the same slice, as neither sees
// the other's slices in flight. Therefore each begins with its own part. The slice's key and the
// pullers' salts alone decide whose part a slice is in (rendezvous hashing: Thaler and Ravishankar,
// 1998).
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

  // The source is being filled, by the puller with this salt.
  void add_neighbour(SourceIndex source, std::uint64_t salt);
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
    std::uint64_t salt = 0;  // of a neighbour
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
