#include "transport/schedule/reroute.h"

#include <algorithm>

namespace rekindle::transport {

Ruling rule_on(OpStatus status, bool slow_path) {
  using Blame = Ruling::Blame;
  switch (status) {
    case OpStatus::kAborted:
      // An abort is our own doing and says nothing about the slice. But a slice that was taken from
      // a slow or frozen source goes to another one rather than to the source's next path.
      return {slow_path, false, Blame::kNobody};
    case OpStatus::kPeerLost:
      return {false, false, Blame::kPath};
    case OpStatus::kTimeout:
      return {true, true, Blame::kPath};
    case OpStatus::kFault:
    case OpStatus::kInvalid:
      return {true, true, Blame::kSource};
    case OpStatus::kStale:
    case OpStatus::kDenied:
      return {false, true, Blame::kSourceIsLost};
    case OpStatus::kLocalFault:
    case OpStatus::kOk:
      break;
  }
  return {false, true, Blame::kPath};
}

Ruling rule_on(Verdict verdict) {
  const bool wrong = verdict == Verdict::kRetry;
  return {true, true, wrong ? Ruling::Blame::kSource : Ruling::Blame::kNobody};
}

int Reroutes::failed(SliceIndex slice, SourceIndex source, const Ruling& ruling) {
  put_back(slice);
  ++count_;
  if (!ruling.elsewhere && !ruling.counts_as_attempt) return 0;
  History& history = history_[slice];
  if (ruling.elsewhere) history.failed_at.set(source);
  if (ruling.counts_as_attempt) ++history.attempts;
  return history.attempts;
}

std::optional<SliceIndex> Reroutes::next(SourceIndex source) {
  for (auto it = queue_.begin(); it != queue_.end();) {
    if (!slices_.is_open(*it)) {
      it = queue_.erase(it);
      continue;
    }
    if (may_serve(source, *it, slices_.info(*it))) return *it;
    ++it;
  }
  return std::nullopt;
}

bool Reroutes::may_serve(SourceIndex source, SliceIndex slice, const SliceInfo& info) const {
  if (!info.candidates.test(source)) return false;
  const auto history = history_.find(slice);
  if (history == history_.end() || !history->second.failed_at.test(source)) return true;
  return (info.candidates & sources_.living() & ~history->second.failed_at).empty();
}

bool Stragglers::others_finish_sooner(SourceIndex index, SliceIndex slice,
                                      const SliceInfo& info) const {
  const GoodputMeter& goodput = sources_.source(index).goodput;
  if (!goodput.measured()) return false;
  double others = 0;
  // The fastest source never waits, or all would wait for each other.
  double best = 0;
  const SourceMask holders = sources_.living() & info.candidates;
  for (SourceIndex i = holders.next(); i < kMaxSources; i = holders.next(i + 1)) {
    if (i == index || !reroutes_.may_serve(i, slice, info)) continue;
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
