#include "transport/scheduler.h"

#include <algorithm>
#include <utility>

#include "src/base/units.h"

namespace rekindle::transport {

namespace {

constexpr double kWindowSeconds = 0.5;                 // of the measured goodput
constexpr std::uint64_t kFirstWindowBytes = 4 * kMiB;  // before anything was measured

}  // namespace

Scheduler::Scheduler(SliceIndex slice_count, InfoOf info_of, const BatchOptions& options,
                     TimePoint now)
    : slice_count_(slice_count),
      info_of_(std::move(info_of)),
      options_(options),
      slices_(slice_count),
      sources_(kMaxSources),
      open_slices_(slice_count),
      last_tick_(now) {
  for (SliceIndex slice = 0; slice < slice_count_; ++slice) open_bytes_ += info_of_(slice).bytes;
  if (slice_count_ == 0) finish({});
}

// --- sources and paths

PathId Scheduler::add_path(SourceIndex source, std::string description, TimePoint now,
                           std::string home) {
  const auto id = static_cast<PathId>(paths_.size());
  PathState path;
  path.source = source;
  path.stats.description = description;
  path.stats.home = std::move(home);
  path.stats.source = source;
  path.description = std::move(description);
  path.last_progress = now;
  paths_.push_back(std::move(path));
  SourceState& state = sources_[source];
  state.known = true;
  state.lost = false;
  state.cause.reset();
  state.condemned = false;
  state.cursor = 0;
  state.last_progress = now;
  state.suspect = false;
  state.paths.push_back(id);
  state.rare_cursor = 0;
  state.mine_cursor = 0;
  if (filling_.test(source)) neighbours_.set(source);
  count_starving(now);  // also where this source is gone again before the next tick
  starved_pending_ = starving_since_.has_value();  // told again where it did not help
  if (verdict_) abort_path(id, ErrorCode::kUnavailable, "the batch has ended");
  return id;
}

void Scheduler::remove_source(SourceIndex source, const Error& cause, TimePoint) {
  if (sources_[source].known && !sources_[source].lost) lose_source(source, cause);
}

void Scheduler::abort_path(PathId id, ErrorCode code, const std::string& why) {
  PathState& path = paths_[id];
  if (!path.alive) return;
  path.alive = false;
  path.why = why;
  path.why_code = code;
  path.slow = path.slow || code == ErrorCode::kTimeout;
  SourceState& source = sources_[path.source];
  std::erase(source.paths, id);
  if (source.paths.empty()) neighbour_gone(path.source);
  ++source.draining;
  aborts_.push_back(id);
}

void Scheduler::path_closed(PathId id, const std::string& why, TimePoint) {
  PathState& path = paths_[id];
  if (path.closed) return;
  SourceState& source = sources_[path.source];
  if (path.alive) {  // broke by itself
    path.alive = false;
    path.why = why;
    std::erase(source.paths, id);
    if (source.paths.empty()) neighbour_gone(path.source);
  } else {
    --source.draining;
  }
  path.closed = true;
  if (!verdict_) last_cause_ = path.description + ": " + path.why;
  if (!source.condemned) source.cause = Error(path.why_code, path.description + ": " + path.why);
  maybe_report_lost(path.source);
}

void Scheduler::lose_source(SourceIndex index, const Error& cause) {
  SourceState& source = sources_[index];
  source.cause = cause;
  source.condemned = true;
  last_cause_ = cause.message();
  const auto paths = source.paths;
  for (const PathId path : paths) abort_path(path, cause.code(), cause.message());
  maybe_report_lost(index);
}

// A source is lost when its last path has drained: only then may it come back.
void Scheduler::maybe_report_lost(SourceIndex index) {
  SourceState& source = sources_[index];
  if (source.lost || !source.known || !source.paths.empty() || source.draining > 0) return;
  source.lost = true;
  if (!verdict_) {
    lost_.push_back(
        {index, source.cause.value_or(Error(ErrorCode::kPeerLost, "its paths are gone"))});
  }
}

SourceMask Scheduler::living() const {
  SourceMask mask;
  for (SourceIndex i = 0; i < kMaxSources; ++i) {
    if (!sources_[i].paths.empty()) mask.set(i);
  }
  return mask;
}

// --- slices

SliceInfo Scheduler::info(SliceIndex slice) const { return info_of_(slice); }

void Scheduler::detach(PathState& path, SliceIndex slice) {
  const std::uint64_t bytes = info(slice).bytes;
  std::erase(path.slices, slice);
  path.bytes_in_flight -= bytes;
  sources_[path.source].bytes_in_flight -= bytes;
  --in_flight_slices_;
}

void Scheduler::slice_done(PathId id, SliceIndex slice, OpStatus status, TimePoint now,
                           const std::string& why) {
  PathState& path = paths_[id];
  detach(path, slice);
  if (status == OpStatus::kOk) {
    path.last_progress = sources_[path.source].last_progress = now;
    sources_[path.source].suspect = false;
    path.stats.bytes += info(slice).bytes;
    ++path.stats.slices;
    slices_[slice].state = State::kLanded;
    landed_bytes_ += info(slice).bytes;
    ++landed_slices_;
    return;
  }
  ++path.stats.failures;
  const std::string cause = fmt::format("{}: slice {}: {}", path.description, slice,
                                        why.empty() ? to_string(status) : why);
  const SourceIndex source = path.source;
  staging_freed();
  // An abort is our own doing: it says nothing about the slice. But what was taken from a slow or
  // frozen source goes to another one rather than to its next path.
  const bool ours = status == OpStatus::kAborted;
  const bool at_fault = status == OpStatus::kFault || status == OpStatus::kInvalid;
  const bool slow = status == OpStatus::kTimeout || (ours && path.slow);
  reopen(slice, source, at_fault || slow, !ours && status != OpStatus::kPeerLost, cause);
  if (ours || verdict_) return;
  ++sources_[source].stats.failures;
  if (status == OpStatus::kStale || status == OpStatus::kDenied) {
    lose_source(source, {to_error_code(status), cause});
  } else if (at_fault) {
    strike(source, cause);
  } else {  // the connection broke or stalled
    abort_path(id, to_error_code(status),
               why.empty() ? fmt::format("slice {}: {}", slice, to_string(status)) : why);
  }
}

void Scheduler::set_open(SliceIndex slice) {
  const SliceInfo slice_info = info(slice);
  slices_[slice].state = State::kOpen;
  open_bytes_ += slice_info.bytes;
  ++open_slices_;
  note_group(slice_info);
}

// After one of its slices was posted, or is open again.
void Scheduler::note_group(const SliceInfo& slice_info) {
  const SliceIndex first = slice_info.group_first;
  SliceIndex open = 0;
  for (SliceIndex i = 0; i < slice_info.group_size; ++i) {
    if (slices_[first + i].state == State::kOpen) ++open;
  }
  if (slice_info.group_size > 1 && open > 0 && open < slice_info.group_size) {
    begun_groups_.insert(first);
  } else if (slice_info.group_size > 1) {
    begun_groups_.erase(first);
  }
}

void Scheduler::staging_freed() {
  no_staging_ = false;
  no_staging_for_.clear();
}

void Scheduler::reopen(SliceIndex slice, SourceIndex source, bool exclude, bool count_attempt,
                       const std::string& cause) {
  Slice& state = slices_[slice];
  set_open(slice);
  retry_.push_back(slice);
  ++retried_;
  if ((info(slice).candidates & living()).empty()) look_for_starving_ = true;
  if (exclude) excluded_[slice].set(source);
  if (count_attempt && ++state.attempts >= options_.max_attempts) {
    fail_batch({ErrorCode::kUnavailable, fmt::format("slice {} failed {} times, the last time: {}",
                                                     slice, state.attempts, cause)});
  }
}

void Scheduler::strike(SourceIndex index, const std::string& cause) {
  SourceState& source = sources_[index];
  if (++source.strikes < options_.strikes_to_quarantine) return;
  lose_source(
      index, {ErrorCode::kCorrupt,
              fmt::format("quarantined after {} bad slices, the last: {}", source.strikes, cause)});
}

void Scheduler::unpost(PathId id, SliceIndex slice, TimePoint now) {
  detach(paths_[id], slice);
  set_open(slice);
  retry_.push_back(slice);
  no_staging_ = true;
  no_staging_for_.insert(slice);
  const bool nothing_under_way = in_flight_slices_ == 0 && landed_slices_ == 0;
  if (nothing_under_way && !staging_stuck_since_) staging_stuck_since_ = now;
}

void Scheduler::resolve(SliceIndex slice, Verdict verdict, TimePoint) {
  if (slice >= slice_count_ || slices_[slice].state != State::kLanded) return;
  const std::uint64_t bytes = info(slice).bytes;
  const SourceIndex source = slices_[slice].source;
  staging_freed();
  landed_bytes_ -= bytes;
  --landed_slices_;
  if (verdict == Verdict::kAccept) {
    slices_[slice].state = State::kDone;
    excluded_.erase(slice);
    done_bytes_ += bytes;
    sources_[source].stats.bytes += bytes;
    ++sources_[source].stats.slices;
    if (++done_ == slice_count_) finish({});
    return;
  }
  const bool wrong = verdict == Verdict::kRetry;
  const std::string cause = fmt::format("slice {} from source {} {}", slice, source,
                                        wrong ? "does not verify" : "could not be verified");
  if (wrong) ++sources_[source].stats.failures;
  reopen(slice, source, true, true, cause);
  if (wrong && !verdict_) strike(source, cause);
}

// --- what to post

std::uint64_t Scheduler::window_of(const SourceState& source) const {
  // Streams share one link; each NIC needs a few slices of its own.
  const auto nics = static_cast<std::uint64_t>(
      std::count_if(source.paths.begin(), source.paths.end(),
                    [this](PathId path) { return !paths_[path].stats.home.empty(); }));
  const std::uint64_t most = std::max(options_.window_bytes, nics * options_.window_bytes_per_nic);
  // Not measured yet: a little, and one byte more for each that has come. Of a slow link, or of a
  // source that many begin to pull from, not more is asked than it sends in a while.
  if (source.goodput <= 0) {
    const std::uint64_t first = kFirstWindowBytes + source.landed_since_sample;
    return std::min(most, std::max(first, nics * options_.window_bytes_per_nic / 2));
  }
  return std::min(static_cast<std::uint64_t>(source.goodput * kWindowSeconds), most);
}

// The path with the least in flight, in turn among equals: a source with room for one slice at a
// time still uses all of its NICs, and finds out which of them work. A slice always fits on an
// empty source.
std::optional<PathId> Scheduler::path_for(const SourceState& source, std::uint64_t bytes) const {
  if (source.bytes_in_flight > 0 && source.bytes_in_flight + bytes > window_of(source)) {
    return std::nullopt;
  }
  const auto rank = [this](PathId path) {
    return std::pair(paths_[path].bytes_in_flight, paths_[path].last_posted);
  };
  const auto best = std::min_element(source.paths.begin(), source.paths.end(),
                                     [&](PathId a, PathId b) { return rank(a) < rank(b); });
  return best == source.paths.end() ? std::nullopt : std::optional(*best);
}

// --- the end

void Scheduler::cancel() { fail_batch({ErrorCode::kUnavailable, "cancelled"}); }

void Scheduler::fail_batch(Error error) {
  if (!verdict_) finish(fail(std::move(error)));
}

void Scheduler::finish(Result<void> outcome) {
  verdict_ = std::move(outcome);
  for (PathId id = 0; id < paths_.size(); ++id) {
    abort_path(id, ErrorCode::kUnavailable, "the batch has ended");
  }
}

std::optional<Result<void>> Scheduler::outcome() const {
  return in_flight_slices_ == 0 ? verdict_ : std::nullopt;
}

std::vector<PathId> Scheduler::take_aborts() { return std::exchange(aborts_, {}); }
std::vector<Scheduler::Lost> Scheduler::take_lost() { return std::exchange(lost_, {}); }

std::optional<std::uint64_t> Scheduler::take_starved() {
  if (!std::exchange(starved_pending_, false) || verdict_) return std::nullopt;
  return starving_slices_;
}

BatchProgress Scheduler::progress() const {
  BatchProgress progress;
  progress.slices_done = done_;
  progress.bytes_done = done_bytes_;
  progress.retried_slices = retried_;
  progress.stolen_slices = stolen_;
  progress.last_byte = last_byte_;
  for (const auto& source : sources_) {
    SourceStats stats = source.stats;
    stats.goodput_bytes_per_second = source.paths.empty() ? 0 : source.goodput;
    stats.paths = source.paths.size();
    stats.lost = source.lost;
    progress.bytes_in_flight += source.bytes_in_flight;
    progress.sources.push_back(stats);
  }
  while (!progress.sources.empty() && !sources_[progress.sources.size() - 1].known) {
    progress.sources.pop_back();
  }
  for (const auto& path : paths_) {
    progress.paths.push_back(path.stats);
    progress.paths.back().alive = path.alive;
  }
  return progress;
}

}  // namespace rekindle::transport
