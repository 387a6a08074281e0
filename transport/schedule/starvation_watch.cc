#include "transport/schedule/starvation_watch.h"

#include <utility>

namespace rekindle::transport {

void StarvationWatch::path_added(TimePoint now) {
  // The source may be gone again before the next tick.
  recount(now);
  untold_ = starving_since_.has_value();
}

void StarvationWatch::slice_reopened(const SliceInfo& info) {
  if ((info.candidates & sources_.living()).empty()) recount_wanted_ = true;
}

void StarvationWatch::prospects_changed() {
  if (starving_ > 0) recount_wanted_ = true;
}

void StarvationWatch::candidates_gained(TimePoint now) {
  if (waiting_since_) waiting_since_ = now;
}

void StarvationWatch::recount(TimePoint now) {
  const SourceMask alive = sources_.living() | sources_.draining();
  if (!recount_wanted_ && alive == living_at_recount_) return;
  recount_wanted_ = false;
  living_at_recount_ = alive;
  starving_ = 0;
  for (SliceIndex slice = 0; slice < slices_.count(); ++slice) {
    if (!slices_.is_open(slice)) continue;
    const SliceInfo info = slices_.info(slice);
    if (((info.candidates | info.prospects) & alive).empty()) ++starving_;
  }
  if (starving_ == 0) {
    starving_since_.reset();
    untold_ = false;
  } else if (!starving_since_) {
    starving_since_ = now;
    untold_ = true;
  }
}

std::optional<Error> StarvationWatch::tick(bool waiting, TimePoint now) {
  recount(now);
  if (auto error = check_prospects(waiting && starving_ == 0, now)) return error;
  if (!starving_since_ || now - *starving_since_ < options_.starvation_timeout) return std::nullopt;
  return Error(ErrorCode::kUnavailable,
               fmt::format("no living source holds {} of {} slices; the last cause: {}", starving_,
                           slices_.count(), sources_.last_cause()));
}

// A source that is being filled may get the rest, but it may also wait for us.
std::optional<Error> StarvationWatch::check_prospects(bool waiting, TimePoint now) {
  if (!waiting) {
    waiting_since_.reset();
    return std::nullopt;
  }
  if (!waiting_since_) waiting_since_ = now;
  if (now - *waiting_since_ < options_.prospect_timeout) return std::nullopt;
  return Error(ErrorCode::kUnavailable,
               fmt::format("{} of {} slices are held by nobody, and for {} ms no source has got "
                           "more of them",
                           slices_.open(), slices_.count(), milliseconds(now - *waiting_since_)));
}

void StarvationWatch::forgive(Duration pause) {
  if (starving_since_) *starving_since_ += pause;
  if (waiting_since_) *waiting_since_ += pause;
}

std::optional<std::uint64_t> StarvationWatch::take() {
  if (!std::exchange(untold_, false)) return std::nullopt;
  return starving_;
}

}  // namespace rekindle::transport
