#include "src/bucket/pipeline.h"

#include <algorithm>

namespace rekindle::bucket {

Pipeline::Pipeline(Device& device, std::size_t buckets, Slots& slots, Fetch& fetch, Spread* spread,
                   Deliver& deliver, PipelineOptions options)
    : device_(device),
      buckets_(buckets),
      slots_(slots),
      fetch_(fetch),
      spread_(spread),
      deliver_(deliver),
      options_(options),
      states_(slots.count()) {}

Pipeline::~Pipeline() = default;

Result<void> Pipeline::start() {
  TRY(fetch_stream_, device_.make_stream());
  if (spread_ == nullptr) return {};
  TRY(spread_stream_, device_.make_stream());
  for (std::size_t i = 0; i < states_.size(); ++i) {
    TRY(auto event, device_.make_event());
    fetched_.push_back(std::move(event));
  }
  return {};
}

// Slots go round: a bucket's successor never overtakes it on the way to the consumer.
Result<bool> Pipeline::fill(std::uint32_t slot, TimePoint now) {
  const auto bucket = fetch_.next();
  if (!bucket) return false;
  TRY_VOID(fetch_.enqueue(*bucket, slots_.at(slot), *fetch_stream_));
  Stream* last = fetch_stream_.get();
  if (spread_ != nullptr) {
    TRY_VOID(fetch_stream_->record(*fetched_[slot]));
    TRY_VOID(spread_stream_->wait(*fetched_[slot]));
    TRY_VOID(spread_->enqueue(*bucket, slots_.at(slot), *spread_stream_));
    last = spread_stream_.get();
  }
  TRY_VOID(last->record(*slots_.filled[slot]));
  states_[slot] = {true, false, now + options_.fill_deadline, now + options_.release_deadline};
  ++filled_;
  TRY_VOID(deliver_.hand_over(*bucket, slot));
  return true;
}

// A device that hangs says nothing: only that its copies do not end.
Result<void> Pipeline::check_filled(std::uint32_t slot, TimePoint now) {
  if (states_[slot].filled) return {};
  TRY(states_[slot].filled, device_.is_done(*slots_.filled[slot]));
  if (states_[slot].filled || now < states_[slot].fill_by) return {};
  return fail(ErrorCode::kInternal, "{} has not filled a bucket for {} ms", device_.name(),
              options_.fill_deadline.count());
}

Result<bool> Pipeline::collect(TimePoint now) {
  bool any = false;
  for (std::uint32_t slot = 0; slot < states_.size(); ++slot) {
    if (!states_[slot].busy) continue;
    TRY_VOID(check_filled(slot, now));
    TRY(const bool released, deliver_.released(slot));
    if (released) {
      states_[slot].busy = false;
      ++delivered_;
      any = true;
    } else if (now >= states_[slot].release_by) {
      return fail(ErrorCode::kTimeout,
                  "the consumer has kept a bucket for {} ms: it is stopped, or hangs",
                  options_.release_deadline.count());
    }
  }
  return any;
}

Result<Pipeline::State> Pipeline::step(TimePoint now) {
  for (bool progress = true; progress;) {
    TRY(progress, collect(now));
    while (filled_ < buckets_ && !states_[next_slot_].busy) {
      TRY(const bool filled, fill(next_slot_, now));
      if (!filled) break;
      next_slot_ = (next_slot_ + 1) % slots_.count();
      progress = true;
    }
  }
  if (delivered_ == buckets_) return State::kDone;
  const bool room = filled_ < buckets_ && !states_[next_slot_].busy;
  return room ? State::kFetching : State::kReleasing;
}

std::optional<TimePoint> Pipeline::deadline() const {
  std::optional<TimePoint> first;
  for (const Slot& slot : states_) {
    if (!slot.busy) continue;
    const TimePoint due = slot.filled ? slot.release_by : std::min(slot.fill_by, slot.release_by);
    if (!first || due < *first) first = due;
  }
  return first;
}

Result<void> Pipeline::drain(TimePoint deadline) {
  for (Stream* stream : {fetch_stream_.get(), spread_stream_.get()}) {
    if (stream != nullptr) TRY_VOID(stream->finish(deadline));
  }
  return {};
}

}  // namespace rekindle::bucket
