#include <algorithm>
#include <bit>
#include <utility>

#include "transport/scheduler.h"

// Which slice is asked of which source next.
//
// Without sources that are being filled the slices are taken in the batch's order. With them
// (neighbours: pullers of the same thing) there is a trade: what a neighbour has gained is taken
// from it, the slices that the fewest neighbours hold first; and a source that holds everything is
// asked for what no neighbour holds, so that it sends each byte about once and the pullers have
// something to give each other. Two of them would still ask it for the same slice, as neither sees
// what the other has under way: each begins with its own part of them. Whose a slice is follows
// from its key and the pullers' salts alone (rendezvous hashing: Thaler and Ravishankar, 1998).
namespace rekindle::transport {

namespace {

constexpr std::size_t kLookedAt = 64;            // slices that are compared for one choice
constexpr SliceIndex kPositionsLookedAt = 4096;  // and places in the order, at most

// Numbers that differ little become numbers that differ much.
std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 33)) * 0xff51afd7ed558ccdu;
  value = (value ^ (value >> 33)) * 0xc4ceb9fe1a85ec53u;
  return value ^ (value >> 33);
}

}  // namespace

SliceIndex Scheduler::slice_at(SliceIndex position) const {
  if (!options_.order.empty()) return options_.order[position];
  return static_cast<SliceIndex>((std::uint64_t{position} + options_.first_slice) % slice_count_);
}

void Scheduler::add_neighbour(SourceIndex source, std::uint64_t salt) {
  filling_.set(source);
  sources_[source].salt = salt;
  if (!sources_[source].paths.empty()) neighbours_.set(source);
  if (starving_slices_ > 0) look_for_starving_ = true;
}

void Scheduler::candidates_added(SourceIndex source, std::span<const SliceIndex> slices,
                                 TimePoint now) {
  SourceState& state = sources_[source];
  for (const SliceIndex slice : slices) {
    if (slice < slice_count_ && slices_[slice].state != State::kDone) {
      state.offered.push_back(slice);
    }
  }
  if (waiting_since_ && !slices.empty()) waiting_since_ = now;
  if (starving_slices_ > 0) look_for_starving_ = true;
}

// What it alone held is rare again, and what it was to fetch is another's, perhaps ours.
void Scheduler::neighbour_gone(SourceIndex source) {
  if (!neighbours_.test(source)) return;
  neighbours_.reset(source);
  for (auto& other : sources_) other.rare_cursor = other.mine_cursor = 0;
}

// Of those who want it, the one whose salt gives the highest number.
bool Scheduler::is_mine(const SliceInfo& slice_info) const {
  const std::uint64_t key = mixed(slice_info.key + 1);
  const std::uint64_t ours = mixed(key ^ options_.salt);
  const SourceMask wanting = (slice_info.candidates | slice_info.prospects) & neighbours_;
  for (std::uint64_t left = wanting.bits(); left != 0; left &= left - 1) {
    const auto source = static_cast<std::size_t>(std::countr_zero(left));
    if (mixed(key ^ sources_[source].salt) > ours) return false;
  }
  return true;
}

bool Scheduler::may_serve(SourceIndex source, SliceIndex slice, const SliceInfo& slice_info) const {
  if (!slice_info.candidates.test(source)) return false;
  const auto excluded = excluded_.find(slice);
  if (excluded == excluded_.end() || !excluded->second.test(source)) return true;
  // Excluded, but better than nobody.
  return (slice_info.candidates & living() & ~excluded->second).empty();
}

// Near the end: would the others fetch all that is open before this source had fetched one slice?
bool Scheduler::worth_waiting_for_others(SourceIndex index, SliceIndex slice,
                                         const SliceInfo& slice_info) const {
  const SourceState& source = sources_[index];
  if (source.goodput <= 0) return false;
  double others = 0;
  double best = 0;  // the fastest never waits, or all would wait for each other
  for (SourceIndex i = 0; i < kMaxSources; ++i) {
    if (i != index && !sources_[i].paths.empty() && may_serve(i, slice, slice_info)) {
      others += sources_[i].goodput;
      best = std::max(best, sources_[i].goodput);
    }
  }
  if (best <= 0) return false;
  const auto slice_bytes = static_cast<double>(slice_info.bytes);
  const double ours_s = slice_bytes / source.goodput;
  const double theirs_s = std::max(static_cast<double>(open_bytes_) / others, slice_bytes / best);
  return ours_s > options_.steal_factor * theirs_s;
}

// Entries of retry_ that were posted meanwhile are dropped when they are come across.
std::optional<SliceIndex> Scheduler::pick_retry(SourceIndex index) {
  for (auto it = retry_.begin(); it != retry_.end();) {
    if (slices_[*it].state != State::kOpen) {
      it = retry_.erase(it);
      continue;
    }
    if (may_serve(index, *it, info(*it))) return *it;
    ++it;
  }
  return std::nullopt;
}

// What frees staging memory that is taken goes before what takes more.
std::optional<SliceIndex> Scheduler::pick_of_begun_group(SourceIndex index) {
  for (const SliceIndex first : begun_groups_) {
    const SliceIndex size = info(first).group_size;
    for (SliceIndex slice = first; slice < first + size; ++slice) {
      if (slices_[slice].state != State::kOpen || no_staging_for_.contains(slice)) continue;
      if (may_serve(index, slice, info(slice))) return slice;
    }
  }
  return std::nullopt;
}

std::optional<SliceIndex> Scheduler::pick(SourceIndex index) {
  if (auto slice = pick_of_begun_group(index)) return slice;
  if (no_staging_) return std::nullopt;
  if (auto slice = pick_retry(index)) return slice;
  if (filling_.test(index)) return pick_offered(index);
  if (neighbours_.empty()) return pick_in_order(index);
  return pick_rare(index);
}

std::optional<SliceIndex> Scheduler::pick_in_order(SourceIndex index) {
  SourceState& source = sources_[index];
  for (; source.cursor < slice_count_; ++source.cursor) {
    const SliceIndex slice = slice_at(source.cursor);
    if (slices_[slice].state == State::kOpen && may_serve(index, slice, info(slice))) return slice;
  }
  return std::nullopt;
}

// What a neighbour has: the rarest of some, and of those that are equally rare not the one that
// every other puller takes. Those that were taken since they were offered leave the list here;
// should one of them open again, it is in retry_.
std::optional<SliceIndex> Scheduler::pick_offered(SourceIndex index) {
  auto& offered = sources_[index].offered;
  std::optional<SliceIndex> best;
  std::pair<int, std::uint64_t> best_rank;
  std::size_t looked_at = 0;
  for (std::size_t i = 0; i < offered.size() && looked_at < kLookedAt;) {
    const SliceIndex slice = offered[i];
    if (slices_[slice].state != State::kOpen) {
      offered[i] = offered.back();
      offered.pop_back();
      continue;
    }
    ++i;
    const SliceInfo slice_info = info(slice);
    if (!may_serve(index, slice, slice_info)) continue;
    ++looked_at;
    const std::pair rank(holders_of(slice_info), mixed(slice ^ options_.salt));
    if (best && rank >= best_rank) continue;
    best = slice;
    best_rank = rank;
  }
  return best;
}

std::optional<SliceIndex> Scheduler::pick_unheld(SourceIndex index, bool only_mine) {
  SourceState& source = sources_[index];
  SliceIndex& cursor = only_mine ? source.mine_cursor : source.rare_cursor;
  for (; cursor < slice_count_; ++cursor) {
    const SliceIndex slice = slice_at(cursor);
    if (slices_[slice].state != State::kOpen) continue;
    const SliceInfo slice_info = info(slice);
    if (!may_serve(index, slice, slice_info) || holders_of(slice_info) > 0) continue;
    if (!only_mine || is_mine(slice_info)) return slice;
  }
  return std::nullopt;
}

// Of a source that is not being filled: what no neighbour holds, in the batch's order, our own part
// before that of others. When there is nothing of that left, the rarest of the next slices.
std::optional<SliceIndex> Scheduler::pick_rare(SourceIndex index) {
  if (auto slice = pick_unheld(index, true)) return slice;
  if (auto slice = pick_unheld(index, false)) return slice;
  SourceState& source = sources_[index];
  auto best = pick_in_order(index);  // leaves the cursor there
  if (!best) return std::nullopt;
  int best_holders = holders_of(info(*best));
  std::size_t looked_at = 1;
  const SliceIndex end = source.cursor + std::min(slice_count_ - source.cursor, kPositionsLookedAt);
  for (SliceIndex at = source.cursor + 1; at < end && looked_at < kLookedAt; ++at) {
    const SliceIndex slice = slice_at(at);
    if (slices_[slice].state != State::kOpen) continue;
    const SliceInfo slice_info = info(slice);
    if (!may_serve(index, slice, slice_info)) continue;
    ++looked_at;
    if (holders_of(slice_info) >= best_holders) continue;
    best = slice;
    best_holders = holders_of(slice_info);
  }
  return best;
}

std::optional<Scheduler::Post> Scheduler::post_from(SourceIndex index, TimePoint now) {
  SourceState& source = sources_[index];
  if (source.paths.empty() || !path_for(source, 0)) return std::nullopt;
  const auto slice = pick(index);
  if (!slice) return std::nullopt;
  const SliceInfo slice_info = info(*slice);
  const auto path = path_for(source, slice_info.bytes);
  if (!path || worth_waiting_for_others(index, *slice, slice_info)) return std::nullopt;
  slices_[*slice].state = State::kPosted;
  slices_[*slice].source = static_cast<std::uint8_t>(index);
  PathState& chosen = paths_[*path];
  if (chosen.slices.empty()) chosen.last_progress = now;
  chosen.last_posted = ++posts_;
  if (source.bytes_in_flight == 0) begin_waiting(source, now);
  chosen.slices.push_back(*slice);
  chosen.bytes_in_flight += slice_info.bytes;
  source.bytes_in_flight += slice_info.bytes;
  open_bytes_ -= slice_info.bytes;
  --open_slices_;
  ++in_flight_slices_;
  note_group(slice_info);
  waiting_since_.reset();
  next_source_ = (index + 1) % kMaxSources;
  return Post{*slice, index, *path};
}

// In turn; neighbours before those who can give what nobody else can.
std::optional<Scheduler::Post> Scheduler::next_post(TimePoint now) {
  if (verdict_ || open_slices_ == 0 || (no_staging_ && begun_groups_.empty())) return std::nullopt;
  if (landed_bytes_ > 2 * options_.window_bytes) return std::nullopt;  // verification lags behind
  for (const bool neighbours : {true, false}) {
    if (neighbours && neighbours_.empty()) continue;
    for (SourceIndex step = 0; step < kMaxSources; ++step) {
      const SourceIndex index = (next_source_ + step) % kMaxSources;
      if (neighbours_.test(index) != neighbours) continue;
      if (auto post = post_from(index, now)) return post;
    }
  }
  return std::nullopt;
}

}  // namespace rekindle::transport
