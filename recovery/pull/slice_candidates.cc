#include "recovery/pull/slice_candidates.h"

#include <bit>
#include <utility>

namespace rekindle::pull {

using transport::SliceIndex;
using transport::SourceIndex;
using transport::SourceMask;

SliceCandidates::SliceCandidates(std::shared_ptr<const planner::Plan> plan, SourceMask growing,
                                 std::uint32_t suspicion)
    : plan_(std::move(plan)),
      growing_(growing),
      suspicion_(suspicion),
      availability_(*plan_, growing) {}

void SliceCandidates::add_source(SourceIndex source, std::shared_ptr<const Layout> layout) {
  {
    const std::lock_guard lock(mutex_);
    added_[source] = layout;
  }
  availability_.add_source(source, *layout);
}

std::vector<SliceIndex> SliceCandidates::extend(SourceIndex source, const swarm::TileRuns& held) {
  return availability_.extend(source, held);
}

std::vector<SliceIndex> SliceCandidates::complete(SourceIndex source) {
  return availability_.complete(source);
}

transport::SliceInfo SliceCandidates::info(SliceIndex slice) const {
  transport::SliceInfo info{plan_->slice_bytes(slice), availability_.candidates(slice),
                            availability_.prospects(slice)};
  info.key = availability_.key(slice);
  if (plan_->group_size(slice) == 1) return info;
  if (plan_->kind(slice) == planner::SliceKind::kStaged) {
    info.group_first = plan_->group_first(slice);
    info.group_size = plan_->group_size(slice);
  }
  if (suspicion_ == 0) return info;
  if (const SourceMask chosen = chosen_for_group(slice); !chosen.empty()) {
    info.candidates = chosen;
    info.prospects = {};
  }
  return info;
}

// Only a source that holds every slice of the group can answer for all of it. Sources that are
// being filled are left out, because the choice must not change while the group is read.
SourceMask SliceCandidates::chosen_for_group(SliceIndex slice) const {
  const SourceMask candidates = plan_->candidates(slice) & ~growing_;
  const SliceIndex first = plan_->group_first(slice);
  SourceMask common = candidates;
  for (SliceIndex i = first; i < first + plan_->group_size(slice); ++i) {
    common = common & plan_->candidates(i);
  }
  if (common.empty()) return candidates;
  auto skip = (first + suspicion_) % static_cast<std::uint32_t>(common.count());
  for (SourceIndex source = 0; source < transport::kMaxSources; ++source) {
    if (!common.test(source) || skip-- > 0) continue;
    SourceMask chosen;
    chosen.set(source);
    return chosen;
  }
  return candidates;
}

void SliceCandidates::expand(SliceIndex slice, SourceIndex source, planner::Expansion& out) const {
  std::shared_ptr<const Layout> layout;
  {
    const std::lock_guard lock(mutex_);
    if (const auto added = added_.find(source); added != added_.end()) layout = added->second;
  }
  if (layout != nullptr) return plan_->expand_from(slice, *layout, out);
  plan_->expand(slice, source, out);
}

std::optional<SourceIndex> SliceCandidates::only_source(SliceIndex first, SliceIndex last) const {
  SourceMask all;
  for (SliceIndex i = first; i <= last; ++i) all = all | info(i).candidates;
  if (all.count() != 1) return std::nullopt;
  return static_cast<SourceIndex>(std::countr_zero(all.bits()));
}

}  // namespace rekindle::pull
