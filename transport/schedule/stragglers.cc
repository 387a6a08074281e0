#include "transport/schedule/stragglers.h"

#include <algorithm>

namespace rekindle::transport {

bool Stragglers::others_finish_sooner(SourceIndex index, SliceIndex slice,
                                      const SliceInfo& info) const {
  const GoodputMeter& goodput = sources_.source(index).goodput;
  if (!goodput.measured()) return false;
  double others = 0;
  // The fastest source never waits, or all would wait for each other.
  double best = 0;
  for (SourceIndex i = 0; i < kMaxSources; ++i) {
    if (i == index || !sources_.living().test(i) || !reroutes_.may_serve(i, slice, info)) continue;
    const double rate = sources_.source(i).goodput.bytes_per_second();
    others += rate;
    best = std::max(best, rate);
  }
  if (best <= 0) return false;
  const auto slice_bytes = static_cast<double>(info.bytes);
  const double ours_s = slice_bytes / goodput.bytes_per_second();
  const double theirs_s =
      std::max(static_cast<double>(slices_.open_bytes()) / others, slice_bytes / best);
  return ours_s > options_.steal_factor * theirs_s;
}

bool Stragglers::can_steal(SourceIndex index) const {
  const auto& source = sources_.source(index);
  return !source.paths.empty() && source.bytes_in_flight == 0 && source.goodput.measured();
}

std::optional<PathId> Stragglers::find_victim(SourceIndex thief) const {
  for (PathId id = 0; id < sources_.path_count(); ++id) {
    if (is_victim(id, thief)) return id;
  }
  return std::nullopt;
}

bool Stragglers::is_victim(PathId id, SourceIndex thief) const {
  const auto& path = sources_.path(id);
  if (!path.takes_slices() || path.slices.empty() || path.source() == thief) return false;
  const auto& victim = sources_.source(path.source());
  const double victim_rate = victim.goodput.bytes_per_second_now();
  if (victim_rate <= 0) return false;
  // The last path of a source is not cut while an open slice may still need that source.
  if (victim.paths.size() == 1 && slices_.open() > 0) return false;
  const auto bytes = static_cast<double>(path.bytes_in_flight);
  const double theirs_s = bytes * static_cast<double>(victim.paths.size()) / victim_rate;
  const double ours_s = bytes / sources_.source(thief).goodput.bytes_per_second();
  if (theirs_s < options_.steal_factor * ours_s + seconds(GoodputMeter::kStallGrace)) return false;
  return std::all_of(path.slices.begin(), path.slices.end(), [&](SliceIndex slice) {
    return reroutes_.may_serve(thief, slice, slices_.info(slice));
  });
}

}  // namespace rekindle::transport
