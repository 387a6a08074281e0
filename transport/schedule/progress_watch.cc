#include "transport/schedule/progress_watch.h"

#include <algorithm>
#include <utility>

#include "src/base/units.h"

namespace rekindle::transport {

void ProgressWatch::path_added(SourceIndex source, TimePoint now) {
  path_progress_.push_back(now);
  source_progress_[source] = {now, false};
}

void ProgressWatch::slice_will_be_posted(PathId id, TimePoint now) {
  const auto& path = sources_.path(id);
  if (path.slices.empty()) path_progress_[id] = now;
  if (sources_.source(path.source()).bytes_in_flight > 0) return;
  // Slices of a path that was cut go to the next path of the same source with half of the time.
  SourceProgress& source = source_progress_[path.source()];
  const TimePoint since = source.suspect ? now - options_.progress_timeout / 2 : now;
  source.last = std::max(source.last, since);
}

void ProgressWatch::byte_landed(PathId path, TimePoint now) {
  slice_landed(path, now);
  last_byte_ = now;
}

void ProgressWatch::slice_landed(PathId path, TimePoint now) {
  path_progress_[path] = now;
  source_progress_[sources_.path(path).source()] = {now, false};
}

void ProgressWatch::forgive(Duration pause) {
  for (auto& last : path_progress_) last += pause;
  for (auto& source : source_progress_) source.last += pause;
}

std::vector<ProgressWatch::Overdue> ProgressWatch::overdue(TimePoint now) {
  std::vector<Overdue> found;
  SourceMask suspected;
  for (SourceIndex i = 0; i < kMaxSources; ++i) {
    if (source_progress_[i].suspect) suspected.set(i);
  }
  for (PathId id = 0; id < sources_.path_count(); ++id) {
    const auto& path = sources_.path(id);
    if (!path.takes_slices()) continue;
    const SourceIndex index = path.source();
    const auto& source = sources_.source(index);
    SourceProgress& progress = source_progress_[index];
    if (source.bytes_in_flight == 0 &&
        now - std::max(path_progress_[id], progress.last) >= options_.idle_timeout) {
      found.push_back({id, ErrorCode::kUnavailable, "not needed for a while: closed"});
      continue;
    }
    const bool path_silent =
        !path.slices.empty() && now - path_progress_[id] >= options_.progress_timeout;
    const bool source_silent =
        source.bytes_in_flight > 0 && now - progress.last >= options_.progress_timeout;
    const bool all_paths_go = path.stats.home.empty() || suspected.test(index);
    if (!path_silent && !(all_paths_go && source_silent)) continue;
    progress.suspect = true;
    const TimePoint since = path_silent ? path_progress_[id] : progress.last;
    const std::uint64_t bytes = path_silent ? path.bytes_in_flight : source.bytes_in_flight;
    found.push_back({id, ErrorCode::kTimeout,
                     fmt::format("no byte for {} ms with {} in flight", milliseconds(now - since),
                                 format_bytes(bytes))});
  }
  return found;
}

bool ProgressWatch::is_sending(SourceIndex source, TimePoint now) const {
  return now - source_progress_[source].last < options_.progress_timeout / 2;
}

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
