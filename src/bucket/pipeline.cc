#include "src/bucket/pipeline.h"

#include <algorithm>

namespace rekindle::bucket {

Pipeline::Pipeline(Device& device, std::size_t buckets, Slots& slots, Fetch& fetch, Spread* spread,
                   Deliver& deliver, PipelineOptions options)
    : device_(device),
      buckets_(buckets),
      slots_(slots),
      fetch_(&fetch),
      spread_(spread),
      deliver_(deliver),
      options_(options),
      states_(slots.count()) {}

Pipeline::~Pipeline() = default;

Result<void> Pipeline::start() {
  TRY(fetch_stream_, device_.make_stream());
  return spread_ == nullptr ? Result<void>() : spread_with(*fetch_, *spread_);
}

Result<void> Pipeline::spread_with(Fetch& fetch, Spread& spread) {
  TRY(spread_stream_, device_.make_stream());
  TRY_VOID(make_events(device_, states_.size(), fetched_));
  fetch_ = &fetch;
  spread_ = &spread;
  return {};
}

Result<void> Pipeline::verify_with(Verify& verify) {
  verify_ = &verify;
  TRY(verify_stream_, device_.make_stream());
  return make_events(device_, states_.size(), brought_);
}

// Later work of `after` runs behind the queued work of `before`.
Result<Stream*> Pipeline::go_on(Stream& before, Event& event, Stream& after) {
  TRY_VOID(before.record(event));
  TRY_VOID(after.wait(event));
  return &after;
}

// Queueing a spread may wait for peers, and verifying may compute on the host. Deadlines of later
// work begin after that.
TimePoint Pipeline::latest(TimePoint now) const {
  return hands_over_at_once() ? now : std::max(now, SteadyClock().now());
}

// Slots are used in turn, so buckets reach the consumer in order.
Result<bool> Pipeline::fill(std::uint32_t slot, TimePoint now) {
  const auto bucket = fetch_->next();
  if (!bucket) return false;
  TRY_VOID(fetch_->enqueue(*bucket, slots_.at(slot), *fetch_stream_));
  Stream* last = fetch_stream_.get();
  if (spread_ != nullptr) {
    TRY(last, go_on(*last, *fetched_[slot], *spread_stream_));
    TRY_VOID(spread_->enqueue(*bucket, slots_.at(slot), *last));
  }
  if (verify_ != nullptr) {
    TRY(last, go_on(*last, *brought_[slot], *verify_stream_));
    TRY_VOID(verify_->enqueue(*bucket, slot, slots_.at(slot), *last));
  }
  TRY_VOID(last->record(*slots_.filled[slot]));
  states_[slot] = {.busy = true,
                   .filled = false,
                   .handed_over = false,
                   .kept = keep_ == nullptr,
                   .released = false,
                   .bucket = *bucket,
                   .brought_at = {},
                   .fill_by = latest(now) + options_.fill_deadline,
                   .release_by = {},
                   .keep_by = {}};
  next_slot_ = (next_slot_ + 1) % slots_.count();
  ++queued_;
  if (hands_over_at_once()) TRY_VOID(hand_over_next(now));
  return true;
}

Result<void> Pipeline::hand_over_next(TimePoint now) {
  const std::uint32_t slot = next_hand_over_;
  states_[slot].handed_over = true;
  states_[slot].release_by = now + options_.release_deadline;
  states_[slot].keep_by = now + options_.fill_deadline;
  next_hand_over_ = (next_hand_over_ + 1) % slots_.count();
  ++handed_over_;
  return deliver_.hand_over(states_[slot].bucket, slot);
}

Result<Pipeline::Verdict> Pipeline::verify(std::uint32_t slot, TimePoint now) {
  if (verify_ == nullptr) return Verdict::kRight;
  TRY(const bool right, verify_->check(slot));
  if (right) return Verdict::kRight;
  TRY(const bool again, verify_->refill(slot, *verify_stream_));
  if (!again) return Verdict::kWrong;
  TRY_VOID(verify_stream_->record(*slots_.filled[slot]));
  states_[slot].filled = false;
  states_[slot].brought_at = {};
  states_[slot].fill_by = latest(now) + options_.fill_deadline;
  return Verdict::kAgain;
}

// For a bucket that the consumer must not see.
Result<void> Pipeline::pass_over_next(TimePoint now) {
  const std::uint32_t slot = next_hand_over_;
  TRY_VOID(deliver_.spoil(states_[slot].bucket, verify_->wrong(slot)));
  states_[slot].handed_over = true;
  states_[slot].kept = true;
  states_[slot].release_by = now + options_.release_deadline;
  next_hand_over_ = (next_hand_over_ + 1) % slots_.count();
  ++handed_over_;
  return {};
}

// Buckets that were spread or are verified are checked before the consumer hears of them.
Result<bool> Pipeline::hand_over_filled(TimePoint now) {
  bool any = false;
  for (;;) {
    const std::uint32_t slot = next_hand_over_;
    const Slot& next = states_[slot];
    if (!next.busy || next.handed_over || !next.filled) return any;
    if (spread_ != nullptr) TRY_VOID(spread_->check());
    TRY(const Verdict verdict, verify(slot, now));
    if (verdict == Verdict::kAgain) return any;
    any = true;
    if (verdict == Verdict::kWrong) {
      TRY_VOID(pass_over_next(now));
      continue;
    }
    TRY_VOID(hand_over_next(now));
    if (keep_ != nullptr) TRY_VOID(keep_->offer(next.bucket, slot, slots_.at(slot), now));
  }
}

// A device that hangs shows only by copies that do not end.
Result<void> Pipeline::check_filled(std::uint32_t slot, TimePoint now) {
  Slot& state = states_[slot];
  if (state.filled) return {};
  if (verify_ != nullptr && state.brought_at == TimePoint{}) {
    TRY(const bool brought, device_.is_done(*brought_[slot]));
    if (brought) state.brought_at = now;
  }
  TRY(state.filled, device_.is_done(*slots_.filled[slot]));
  if (state.filled && state.brought_at != TimePoint{}) verifying_ += now - state.brought_at;
  if (state.filled || now < state.fill_by) return {};
  if (spread_ != nullptr && spread_->has_peers() && !states_[slot].handed_over) {
    return fail(ErrorCode::kTimeout,
                "no progress for {} ms in the round on {}: a peer, or the device, is stopped",
                options_.fill_deadline.count(), device_.name());
  }
  return fail(ErrorCode::kInternal, "{} has not filled a bucket for {} ms", device_.name(),
              options_.fill_deadline.count());
}

// A bucket that was handed over is free when the consumer has released it and it is kept.
Result<bool> Pipeline::is_free(std::uint32_t slot, TimePoint now) {
  Slot& state = states_[slot];
  if (!state.kept) {
    TRY(state.kept, keep_->done(slot));
  }
  if (!state.released) {
    TRY(state.released, deliver_.released(slot));
  }
  if (!state.released && now >= state.release_by) {
    return fail(ErrorCode::kTimeout,
                "the consumer has kept a bucket for {} ms: it is stopped, or hangs",
                options_.release_deadline.count());
  }
  if (!state.kept && now >= state.keep_by) {
    return fail(ErrorCode::kInternal, "{} has not copied a bucket to host memory for {} ms",
                device_.name(), options_.fill_deadline.count());
  }
  return state.released && state.kept;
}

Result<bool> Pipeline::collect(TimePoint now) {
  bool any = false;
  for (std::uint32_t slot = 0; slot < states_.size(); ++slot) {
    if (!states_[slot].busy) continue;
    TRY_VOID(check_filled(slot, now));
    if (!states_[slot].handed_over) continue;
    TRY(const bool free, is_free(slot, now));
    if (!free) continue;
    states_[slot].busy = false;
    ++delivered_;
    any = true;
  }
  if (hands_over_at_once()) return any;
  TRY(const bool handed_over, hand_over_filled(now));
  return any || handed_over;
}

Result<Pipeline::State> Pipeline::step(TimePoint now) {
  for (bool progress = true; progress;) {
    now = latest(now);
    TRY(progress, collect(now));
    while (queued_ < buckets_ && !states_[next_slot_].busy) {
      TRY(const bool filled, fill(next_slot_, now));
      if (!filled) break;
      progress = true;
    }
  }
  if (delivered_ == buckets_) return State::kDone;
  const bool room = queued_ < buckets_ && !states_[next_slot_].busy;
  return room ? State::kFetching : State::kReleasing;
}

TimePoint Pipeline::next_of(const Slot& slot) {
  TimePoint due = TimePoint::max();
  if (!slot.filled) due = slot.fill_by;
  if (!slot.released) due = std::min(due, slot.release_by);
  if (!slot.kept) due = std::min(due, slot.keep_by);
  return due;
}

std::optional<TimePoint> Pipeline::deadline() const {
  std::optional<TimePoint> first;
  for (const Slot& slot : states_) {
    if (!slot.busy) continue;
    TimePoint due = slot.fill_by;
    if (slot.handed_over) due = next_of(slot);
    if (!first || due < *first) first = due;
  }
  return first;
}

bool Pipeline::awaits_hand_over() const {
  return std::any_of(states_.begin(), states_.end(),
                     [](const Slot& slot) { return slot.busy && !slot.handed_over; });
}

bool Pipeline::awaits_keep() const {
  return std::any_of(states_.begin(), states_.end(),
                     [](const Slot& slot) { return slot.busy && slot.handed_over && !slot.kept; });
}

Result<void> Pipeline::go_on_without_spread(std::size_t buckets, Fetch& fetch, TimePoint deadline) {
  TRY_VOID(drain(deadline));
  for (Slot& slot : states_) {
    if (!slot.handed_over) slot.busy = false;
    slot.kept = true;
  }
  keep_ = nullptr;
  verify_ = nullptr;
  // Slots are used in turn, so the consumer's slots come right before this one.
  next_slot_ = next_hand_over_;
  queued_ = handed_over_;
  buckets_ = handed_over_ + buckets;
  fetch_ = &fetch;
  spread_ = nullptr;
  spread_stream_.reset();
  verify_stream_.reset();
  fetched_.clear();
  brought_.clear();
  return {};
}

Result<void> Pipeline::drain(TimePoint deadline) {
  for (Stream* stream : {fetch_stream_.get(), spread_stream_.get(), verify_stream_.get()}) {
    if (stream != nullptr) TRY_VOID(stream->finish(deadline));
  }
  if (keep_ != nullptr) TRY_VOID(keep_->drain(deadline));
  return {};
}

}  // namespace rekindle::bucket
