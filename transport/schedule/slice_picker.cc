#include "transport/schedule/slice_picker.h"

#include <algorithm>
#include <utility>

namespace rekindle::transport {
namespace {

constexpr std::size_t kSlicesCompared = 64;
constexpr SliceIndex kPositionsSearched = 4096;

// Mixes the bits of a number: similar numbers give very different results.
std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 33)) * 0xff51afd7ed558ccdu;
  value = (value ^ (value >> 33)) * 0xc4ceb9fe1a85ec53u;
  return value ^ (value >> 33);
}

}  // namespace

void SlicePicker::add_neighbour(SourceIndex source, std::uint64_t order_seed) {
  filling_.set(source);
  places_[source].order_seed = order_seed;
}

void SlicePicker::candidates_added(SourceIndex source, std::span<const SliceIndex> slices) {
  for (const SliceIndex slice : slices) {
    if (slice < slices_.count() && slices_.state(slice) != SliceTable::State::kDone) {
      places_[source].offered.push_back(slice);
    }
  }
}

void SlicePicker::look_again(SourceIndex source) {
  Place& place = places_[source];
  place.in_order = place.unheld = place.our_part = 0;
}

// Slices that a lost neighbour alone held are rare again, and its part falls to the others.
void SlicePicker::notice_lost_neighbours() {
  const SourceMask now = neighbours();
  const SourceMask before = std::exchange(neighbours_at_last_pick_, now);
  if ((before & ~now).empty()) return;
  for (auto& place : places_) place.unheld = place.our_part = 0;
}

SliceIndex SlicePicker::slice_at(SliceIndex position) const {
  if (!options_.order.empty()) return options_.order[position];
  const std::uint64_t shifted = std::uint64_t{position} + options_.first_slice;
  return static_cast<SliceIndex>(shifted % slices_.count());
}

bool SlicePicker::may_take(SourceIndex source, SliceIndex slice, const SliceInfo& info) const {
  return reroutes_.may_serve(source, slice, info);
}

// The slice is ours if our order seed gives the highest number among the pullers that want it.
bool SlicePicker::in_our_part(const SliceInfo& info) const {
  const std::uint64_t key = mixed(info.key + 1);
  const std::uint64_t ours = mixed(key ^ options_.order_seed);
  const SourceMask wanting = (info.candidates | info.prospects) & neighbours();
  for (SourceIndex source = wanting.next(); source < kMaxSources;
       source = wanting.next(source + 1)) {
    if (mixed(key ^ places_[source].order_seed) > ours) return false;
  }
  return true;
}

std::optional<SliceIndex> SlicePicker::pick(SourceIndex source) {
  notice_lost_neighbours();
  const auto begun = staging_.next_of_begun_group(
      [&](SliceIndex slice, const SliceInfo& info) { return may_take(source, slice, info); });
  if (begun || staging_.is_short()) return begun;
  if (auto slice = reroutes_.next(source)) return slice;
  if (filling_.test(source)) return pick_offered(source);
  if (options_.keeps_order || neighbours().empty()) return pick_in_order(source);
  return pick_rare(source);
}

std::optional<SliceIndex> SlicePicker::pick_in_order(SourceIndex source) {
  SliceIndex& position = places_[source].in_order;
  for (; position < slices_.count(); ++position) {
    const SliceIndex slice = slice_at(position);
    if (slices_.is_open(slice) && may_take(source, slice, slices_.info(slice))) return slice;
  }
  return std::nullopt;
}

// Among equally rare slices each puller takes another one, by its order seed. Slices that were
// taken since they were offered leave the list here. Should one open again, Reroutes has it.
std::optional<SliceIndex> SlicePicker::pick_offered(SourceIndex source) {
  auto& offered = places_[source].offered;
  std::optional<SliceIndex> best;
  std::pair<int, std::uint64_t> best_rank;
  std::size_t compared = 0;
  for (std::size_t i = 0; i < offered.size() && compared < kSlicesCompared;) {
    const SliceIndex slice = offered[i];
    if (!slices_.is_open(slice)) {
      offered[i] = offered.back();
      offered.pop_back();
      continue;
    }
    ++i;
    const SliceInfo info = slices_.info(slice);
    if (!may_take(source, slice, info)) continue;
    ++compared;
    const std::pair rank(holders(info), mixed(slice ^ options_.order_seed));
    if (best && rank >= best_rank) continue;
    best = slice;
    best_rank = rank;
  }
  return best;
}

std::optional<SliceIndex> SlicePicker::pick_unheld(SourceIndex source, bool only_our_part) {
  Place& place = places_[source];
  SliceIndex& position = only_our_part ? place.our_part : place.unheld;
  for (; position < slices_.count(); ++position) {
    const SliceIndex slice = slice_at(position);
    if (!slices_.is_open(slice)) continue;
    const SliceInfo info = slices_.info(slice);
    if (!may_take(source, slice, info) || holders(info) > 0) continue;
    if (!only_our_part || in_our_part(info)) return slice;
  }
  return std::nullopt;
}

// For a source that holds everything: slices that no neighbour holds, our own part before those of
// others, then the rarest of the next slices.
std::optional<SliceIndex> SlicePicker::pick_rare(SourceIndex source) {
  if (auto slice = pick_unheld(source, true)) return slice;
  if (auto slice = pick_unheld(source, false)) return slice;
  auto best = pick_in_order(source);  // leaves `in_order` at its position
  if (!best) return std::nullopt;
  int best_holders = holders(slices_.info(*best));
  std::size_t compared = 1;
  const SliceIndex begin = places_[source].in_order;
  const SliceIndex end = begin + std::min(slices_.count() - begin, kPositionsSearched);
  for (SliceIndex at = begin + 1; at < end && compared < kSlicesCompared; ++at) {
    const SliceIndex slice = slice_at(at);
    if (!slices_.is_open(slice)) continue;
    const SliceInfo info = slices_.info(slice);
    if (!may_take(source, slice, info)) continue;
    ++compared;
    if (holders(info) >= best_holders) continue;
    best = slice;
    best_holders = holders(info);
  }
  return best;
}

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
