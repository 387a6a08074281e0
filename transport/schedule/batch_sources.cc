#include "transport/schedule/batch_sources.h"

#include <algorithm>
#include <utility>

#include "src/base/units.h"

namespace rekindle::transport {

namespace {

// A window holds this much of the measured goodput.
constexpr double kWindowSeconds = 0.5;
constexpr std::uint64_t kFirstWindowBytes = 4 * kMiB;
constexpr const char* kBatchEnded = "the batch has ended";

// Streams share one link, but each NIC needs a few slices.
std::uint64_t window_bytes(const BatchSources::Source& source, std::uint64_t nics,
                           const BatchOptions& options) {
  const std::uint64_t most = std::max(options.window_bytes, nics * options.window_bytes_per_nic);
  // Before the first measurement the window grows by each byte that lands. A slow link, or a source
  // that many pullers share, is never asked for more than it sends in a while.
  if (!source.goodput.measured()) {
    const std::uint64_t first = kFirstWindowBytes + source.goodput.bytes_since_sample();
    return std::min(most, std::max(first, nics * options.window_bytes_per_nic / 2));
  }
  return std::min(static_cast<std::uint64_t>(source.goodput.bytes_per_second() * kWindowSeconds),
                  most);
}

}  // namespace

SourceMask BatchSources::draining() const {
  SourceMask mask;
  for (SourceIndex i = 0; i < kMaxSources; ++i) {
    if (sources_[i].draining > 0) mask.set(i);
  }
  return mask;
}

PathId BatchSources::add_path(SourceIndex index, std::string description, std::string home,
                              std::string transport) {
  const auto id = static_cast<PathId>(paths_.size());
  Path& path = paths_.emplace_back();
  path.stats.description = std::move(description);
  path.stats.home = std::move(home);
  path.stats.transport = std::move(transport);
  path.stats.source = index;
  path.rail = rail_of(path.stats);
  Source& source = sources_[index];
  source.presence = Presence::kPresent;
  source.verdict.reset();
  source.last_path_end.reset();
  source.paths.push_back(id);
  living_.set(index);
  if (ended_) abort_path(id, ErrorCode::kUnavailable, kBatchEnded);
  return id;
}

std::size_t BatchSources::rail_of(const PathStats& path) {
  const auto found = std::ranges::find_if(rails_, [&path](const Rail& rail) {
    return rail.stats.transport == path.transport && rail.stats.home == path.home;
  });
  if (found != rails_.end()) return static_cast<std::size_t>(found - rails_.begin());
  Rail& rail = rails_.emplace_back();
  rail.stats.transport = path.transport;
  rail.stats.home = path.home;
  return rails_.size() - 1;
}

void BatchSources::retire(PathId id, PathPhase phase, const std::string& why) {
  Path& path = paths_[id];
  path.phase = phase;
  path.why = why;
  Source& source = sources_[path.source()];
  std::erase(source.paths, id);
  if (source.paths.empty()) living_.reset(path.source());
}

void BatchSources::abort_path(PathId id, ErrorCode code, const std::string& why) {
  Path& path = paths_[id];
  if (!path.takes_slices()) return;
  retire(id, PathPhase::kDraining, why);
  path.why_code = code;
  if (code == ErrorCode::kTimeout) path.slow = true;
  ++sources_[path.source()].draining;
  aborts_.push_back(id);
}

void BatchSources::abort_slow_path(PathId id, ErrorCode code, const std::string& why) {
  paths_[id].slow = true;
  abort_path(id, code, why);
}

void BatchSources::path_closed(PathId id, const std::string& why) {
  Path& path = paths_[id];
  Source& source = sources_[path.source()];
  switch (path.phase) {
    case PathPhase::kTakesSlices:  // it broke
      retire(id, PathPhase::kClosed, why);
      break;
    case PathPhase::kDraining:
      path.phase = PathPhase::kClosed;
      --source.draining;
      break;
    case PathPhase::kClosed:
      return;
  }
  last_cause_ = path.stats.description + ": " + path.why;
  source.last_path_end = Error(path.why_code, last_cause_);
  report_lost_if_gone(path.source());
}

void BatchSources::lose(SourceIndex index, const Error& cause) {
  Source& source = sources_[index];
  source.verdict = cause;
  last_cause_ = cause.message();
  const auto paths = source.paths;
  for (const PathId path : paths) abort_path(path, cause.code(), cause.message());
  report_lost_if_gone(index);
}

void BatchSources::report_lost_if_gone(SourceIndex index) {
  Source& source = sources_[index];
  if (source.presence != Presence::kPresent || !source.paths.empty() || source.draining > 0) return;
  source.presence = Presence::kLost;
  if (ended_) return;
  const auto& cause = source.verdict ? source.verdict : source.last_path_end;
  lost_.push_back({index, cause.value_or(Error(ErrorCode::kPeerLost, "its paths are gone"))});
}

void BatchSources::strike(SourceIndex index, const std::string& cause) {
  Source& source = sources_[index];
  if (++source.strikes < options_.strikes_to_quarantine) return;
  lose(index, {ErrorCode::kCorrupt, fmt::format("quarantined after {} bad slices, the last: {}",
                                                source.strikes, cause)});
}

void BatchSources::end_batch() {
  ended_ = true;
  for (PathId id = 0; id < paths_.size(); ++id) {
    abort_path(id, ErrorCode::kUnavailable, kBatchEnded);
  }
}

// Equal paths take turns: a source with room for one slice at a time still uses all of its NICs,
// and finds out which of them work.
std::optional<PathId> BatchSources::path_with_room(SourceIndex index, std::uint64_t bytes) const {
  const Source& source = sources_[index];
  if (source.paths.empty()) return std::nullopt;
  const auto nics = static_cast<std::uint64_t>(std::ranges::count_if(
      source.paths, [this](PathId path) { return !paths_[path].stats.home.empty(); }));
  if (source.bytes_in_flight > 0 &&
      source.bytes_in_flight + bytes > window_bytes(source, nics, options_)) {
    return std::nullopt;
  }
  const auto rank = [this](PathId path) {
    return std::pair(paths_[path].bytes_in_flight, paths_[path].last_posted);
  };
  return *std::min_element(source.paths.begin(), source.paths.end(),
                           [&](PathId a, PathId b) { return rank(a) < rank(b); });
}

void BatchSources::post(PathId id, SliceIndex slice, std::uint64_t bytes, TimePoint now) {
  Path& path = paths_[id];
  path.slices.push_back(slice);
  path.bytes_in_flight += bytes;
  path.last_posted = ++posts_;
  sources_[path.source()].bytes_in_flight += bytes;
  Rail& rail = rails_[path.rail];
  if (rail.slices_in_flight++ == 0) rail.busy_since = now;
}

void BatchSources::unpost(PathId id, SliceIndex slice, std::uint64_t bytes, TimePoint now) {
  Path& path = paths_[id];
  std::erase(path.slices, slice);
  path.bytes_in_flight -= bytes;
  sources_[path.source()].bytes_in_flight -= bytes;
  Rail& rail = rails_[path.rail];
  rail.stats.busy = rail.busy(now);
  // The other slices begin a new stretch.
  rail.busy_since = std::max(rail.busy_since, now);
  --rail.slices_in_flight;
}

bool BatchSources::bytes_landed(PathId id, std::uint64_t total) {
  Path& path = paths_[id];
  if (total <= path.bytes_landed) return false;
  sources_[path.source()].goodput.landed(total - path.bytes_landed);
  path.bytes_landed = total;
  return true;
}

void BatchSources::sample_goodput(Duration elapsed) {
  for (auto& source : sources_) source.goodput.sample(elapsed, source.bytes_in_flight > 0);
}

void BatchSources::count_landed(PathId id, std::uint64_t bytes) {
  paths_[id].stats.bytes += bytes;
  rails_[paths_[id].rail].stats.bytes += bytes;
  ++paths_[id].stats.slices;
}

void BatchSources::count_accepted(SourceIndex index, std::uint64_t bytes) {
  sources_[index].stats.bytes += bytes;
  ++sources_[index].stats.slices;
}

std::vector<PathId> BatchSources::take_aborts() { return std::exchange(aborts_, {}); }
std::vector<LostSource> BatchSources::take_lost() { return std::exchange(lost_, {}); }

void BatchSources::report(BatchProgress& progress, TimePoint now) const {
  for (const auto& source : sources_) {
    SourceStats stats = source.stats;
    stats.goodput_bytes_per_second = source.paths.empty() ? 0 : source.goodput.bytes_per_second();
    stats.paths = source.paths.size();
    stats.lost = source.presence == Presence::kLost;
    progress.bytes_in_flight += source.bytes_in_flight;
    progress.sources.push_back(stats);
  }
  while (!progress.sources.empty() &&
         sources_[progress.sources.size() - 1].presence == Presence::kUnknown) {
    progress.sources.pop_back();
  }
  for (const auto& path : paths_) {
    progress.paths.push_back(path.stats);
    progress.paths.back().alive = path.takes_slices();
  }
  for (const auto& rail : rails_) {
    progress.rails.push_back(rail.stats);
    progress.rails.back().busy = rail.busy(now);
  }
}

}  // namespace rekindle::transport
