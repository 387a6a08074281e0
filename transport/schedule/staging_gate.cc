#include "transport/schedule/staging_gate.h"

namespace rekindle::transport {

void StagingGate::refused(SliceIndex slice, TimePoint now) {
  short_ = true;
  refused_.insert(slice);
  if (!slices_.any_under_way() && !stuck_since_) stuck_since_ = now;
}

void StagingGate::freed() {
  short_ = false;
  refused_.clear();
}

void StagingGate::group_changed(const SliceInfo& info) {
  if (info.group_size <= 1) return;
  SliceIndex open = 0;
  for (SliceIndex i = 0; i < info.group_size; ++i) {
    if (slices_.is_open(info.group_first + i)) ++open;
  }
  if (open > 0 && open < info.group_size) {
    begun_groups_.insert(info.group_first);
  } else {
    begun_groups_.erase(info.group_first);
  }
}

std::optional<Error> StagingGate::tick(TimePoint now) {
  if (!short_) stuck_since_.reset();
  if (!short_ || slices_.any_under_way()) return std::nullopt;
  if (!stuck_since_) stuck_since_ = now;
  if (now - *stuck_since_ < patience_) {
    freed();
    return std::nullopt;
  }
  if (begun_groups_.empty()) {
    return Error(ErrorCode::kExhausted, "no staging memory for a single slice: raise its budget");
  }
  // Other sources may bring the missing parts: this is not the end of the pull.
  return Error(ErrorCode::kUnavailable,
               fmt::format("{} tiles that come in parts wait for a part that no source brings",
                           begun_groups_.size()));
}

}  // namespace rekindle::transport
