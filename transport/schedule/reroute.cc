#include "transport/schedule/reroute.h"

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

}  // namespace rekindle::transport
