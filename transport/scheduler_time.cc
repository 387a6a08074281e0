#include <algorithm>
#include <utility>

#include "src/base/units.h"
#include "transport/scheduler.h"

// What the scheduler does as time passes: goodput, deadlines, stealing, starvation.
namespace rekindle::transport {

namespace {

constexpr Duration kSampleInterval = std::chrono::milliseconds(50);
constexpr double kGoodputSmoothing = 0.3;
constexpr Duration kStealGrace = std::chrono::milliseconds(100);
constexpr Duration kPause = std::chrono::milliseconds(400);  // between ticks: we were stopped

}  // namespace

void Scheduler::path_progress(PathId id, std::uint64_t bytes_landed, TimePoint now) {
  PathState& path = paths_[id];
  if (bytes_landed <= path.bytes_landed) return;
  sources_[path.source].landed_since_sample += bytes_landed - path.bytes_landed;
  path.bytes_landed = bytes_landed;
  path.last_progress = sources_[path.source].last_progress = last_byte_ = now;
  sources_[path.source].suspect = false;
}

void Scheduler::tick(TimePoint now) {
  const Duration elapsed = now - std::exchange(last_tick_, now);
  if (elapsed > kPause) {
    forgive_pause(elapsed);
    return;
  }
  sample_goodput(elapsed);
  if (verdict_) return;
  check_deadlines(now);
  steal();
  check_staging(now);
  check_starvation(now);
}

// We were stopped, not the peers: no deadline ran meanwhile.
void Scheduler::forgive_pause(Duration pause) {
  for (auto& path : paths_) path.last_progress += pause;
  for (auto& source : sources_) source.last_progress += pause;
  if (starving_since_) *starving_since_ += pause;
  if (staging_stuck_since_) *staging_stuck_since_ += pause;
  if (waiting_since_) *waiting_since_ += pause;
}

// Nothing landed is no sample: a source that has yet to begin is unknown, not infinitely slow.
void Scheduler::sample_goodput(Duration elapsed) {
  for (auto& source : sources_) {
    if (!source.known) continue;
    if (source.bytes_in_flight > 0 || source.landed_since_sample > 0) {
      source.busy_since_sample += elapsed;
    }
    if (source.busy_since_sample < kSampleInterval || source.landed_since_sample == 0) continue;
    const double sample =
        static_cast<double>(source.landed_since_sample) / seconds(source.busy_since_sample);
    source.goodput = source.goodput <= 0
                         ? sample
                         : source.goodput + kGoodputSmoothing * (sample - source.goodput);
    source.landed_since_sample = 0;
    source.busy_since_sample = {};
  }
}

// Goodput, but a source that has stalled since the last sample is as slow as it looks.
double Scheduler::rate_now(const SourceState& source) const {
  if (source.busy_since_sample < kStealGrace) return source.goodput;
  const double current =
      static_cast<double>(std::max<std::uint64_t>(source.landed_since_sample, 1)) /
      seconds(source.busy_since_sample);
  return source.goodput <= 0 ? current : std::min(current, source.goodput);
}

bool Scheduler::is_silent(const SourceState& source, TimePoint now) const {
  return source.bytes_in_flight > 0 && now - source.last_progress >= options_.progress_timeout;
}

// What was cut from a silent path and goes to the next one of the same source does not get all the
// time again.
void Scheduler::begin_waiting(SourceState& source, TimePoint now) const {
  const TimePoint since = source.suspect ? now - options_.progress_timeout / 2 : now;
  source.last_progress = std::max(source.last_progress, since);
}

// A source that sends nothing on any path loses all of them, the idle ones, too: what was in flight
// would only wait for the same silence again on the next path. Where each path is a NIC of its own,
// one of them may be silent alone: all go when a second one is.
void Scheduler::check_deadlines(TimePoint now) {
  SourceMask suspected;
  for (SourceIndex i = 0; i < kMaxSources; ++i) {
    if (sources_[i].suspect) suspected.set(i);
  }
  for (PathId id = 0; id < paths_.size(); ++id) {
    const PathState& path = paths_[id];
    if (!path.alive) continue;
    SourceState& source = sources_[path.source];
    if (source.bytes_in_flight == 0 &&
        now - std::max(path.last_progress, source.last_progress) >= options_.idle_timeout) {
      abort_path(id, ErrorCode::kUnavailable, "not needed for a while: closed");
      continue;
    }
    const bool stuck =
        !path.slices.empty() && now - path.last_progress >= options_.progress_timeout;
    const bool all_go = path.stats.home.empty() || suspected.test(path.source);
    if (!stuck && !(all_go && is_silent(source, now))) continue;
    source.suspect = true;
    const TimePoint since = stuck ? path.last_progress : source.last_progress;
    abort_path(id, ErrorCode::kTimeout,
               fmt::format("no byte for {} ms with {} in flight", milliseconds(now - since),
                           format_bytes(stuck ? path.bytes_in_flight : source.bytes_in_flight)));
  }
}

// A fast source idles, a slow one holds the last slices: take them from it.
void Scheduler::steal() {
  if (no_staging_ || landed_bytes_ > 2 * options_.window_bytes) return;  // idle for another reason
  if (!neighbours_.empty() && open_slices_ > 0) return;  // who trades waits for what is coming
  for (SourceIndex idle = 0; idle < kMaxSources; ++idle) {
    const SourceState& thief = sources_[idle];
    if (thief.paths.empty() || thief.bytes_in_flight > 0 || thief.goodput <= 0 || pick(idle)) {
      continue;
    }
    for (PathId id = 0; id < paths_.size(); ++id) {
      if (!may_steal(id, idle)) continue;
      stolen_ += paths_[id].slices.size();
      paths_[id].slow = true;
      // One that still sends is only slow. The other would have met its deadline soon.
      const Duration quiet = last_tick_ - sources_[paths_[id].source].last_progress;
      const bool sends = quiet < options_.progress_timeout / 2;
      abort_path(id, sends ? ErrorCode::kUnavailable : ErrorCode::kTimeout,
                 fmt::format(
                     "{}: its last slices were taken",
                     sends ? "slower than an idle source" : "silent while another source is idle"));
      return;
    }
  }
}

bool Scheduler::may_steal(PathId id, SourceIndex thief) const {
  const PathState& path = paths_[id];
  if (!path.alive || path.slices.empty() || path.source == thief) return false;
  const SourceState& victim = sources_[path.source];
  const double victim_rate = rate_now(victim);
  if (victim_rate <= 0) return false;
  // The last path of a source is not cut while somebody may still need that source.
  if (victim.paths.size() == 1 && open_slices_ > 0) return false;
  const double share = victim_rate / static_cast<double>(victim.paths.size());
  const double theirs_s = static_cast<double>(path.bytes_in_flight) / share;
  const double ours_s = static_cast<double>(path.bytes_in_flight) / sources_[thief].goodput;
  if (theirs_s < options_.steal_factor * ours_s + seconds(kStealGrace)) return false;
  return std::all_of(path.slices.begin(), path.slices.end(),
                     [&](SliceIndex slice) { return may_serve(thief, slice, info(slice)); });
}

// Others may hold the staging memory: ask again now and then, for as long as for a source.
void Scheduler::check_staging(TimePoint now) {
  if (!no_staging_) staging_stuck_since_.reset();
  if (!no_staging_ || in_flight_slices_ > 0 || landed_slices_ > 0) return;
  if (!staging_stuck_since_) staging_stuck_since_ = now;
  if (now - *staging_stuck_since_ >= options_.starvation_timeout) {
    // Begun groups hold it, and nobody brings the rest of them: other sources may.
    fail_batch(
        begun_groups_.empty()
            ? Error(ErrorCode::kExhausted, "no staging memory for a single slice: raise its budget")
            : Error(ErrorCode::kUnavailable,
                    fmt::format("{} tiles that come in parts wait for a part that no source "
                                "brings",
                                begun_groups_.size())));
    return;
  }
  staging_freed();
}

// A source that is still draining is not gone yet: first it is reported lost, then what that means.
void Scheduler::count_starving(TimePoint now) {
  SourceMask alive = living();
  for (SourceIndex i = 0; i < kMaxSources; ++i) {
    if (sources_[i].draining > 0) alive.set(i);
  }
  if (!look_for_starving_ && alive == starving_looked_at_) return;
  look_for_starving_ = false;
  starving_looked_at_ = alive;
  starving_slices_ = 0;
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) {
    if (slices_[slice].state != State::kOpen) continue;
    const SliceInfo slice_info = info(slice);
    if (((slice_info.candidates | slice_info.prospects) & alive).empty()) ++starving_slices_;
  }
  if (starving_slices_ == 0) {
    starving_since_.reset();
    starved_pending_ = false;
  }
  if (starving_slices_ > 0 && !starving_since_) {
    starving_since_ = now;
    starved_pending_ = true;
  }
}

// Everything that somebody holds has come; the rest is held by nobody, but a source that is being
// filled may get it. That it does is not certain: it may wait for us.
void Scheduler::check_prospects(TimePoint now) {
  const bool waiting = open_slices_ > 0 && in_flight_slices_ == 0 && landed_slices_ == 0 &&
                       !no_staging_ && !neighbours_.empty() && starving_slices_ == 0;
  if (!waiting) {
    waiting_since_.reset();
    return;
  }
  if (!waiting_since_) waiting_since_ = now;
  if (now - *waiting_since_ < options_.prospect_timeout) return;
  fail_batch(
      {ErrorCode::kUnavailable,
       fmt::format("{} of {} slices are held by nobody, and for {} ms no source has got more "
                   "of them",
                   open_slices_, slice_count_, milliseconds(now - *waiting_since_))});
}

void Scheduler::check_starvation(TimePoint now) {
  count_starving(now);
  check_prospects(now);
  if (starving_since_ && now - *starving_since_ >= options_.starvation_timeout) {
    fail_batch({ErrorCode::kUnavailable,
                fmt::format("no living source holds {} of {} slices; the last cause: {}",
                            starving_slices_, slice_count_, last_cause_)});
  }
}

}  // namespace rekindle::transport
