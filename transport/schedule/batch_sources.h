#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/engine.h"

namespace rekindle::transport {

// How fast one source sends while it has work: bytes per second, smoothed over samples of 50 ms.
class GoodputMeter {
 public:
  // A source that has sent nothing for this long is as slow as it looks now.
  static constexpr Duration kStallGrace = std::chrono::milliseconds(100);

  void landed(std::uint64_t bytes) { landed_ += bytes; }

  // `has_work`: something was in flight during `elapsed`. A sample needs bytes: a source that has
  // not begun to send is unknown, not infinitely slow.
  void sample(Duration elapsed, bool has_work) {
    if (has_work || landed_ > 0) busy_ += elapsed;
    if (busy_ < kSampleInterval || landed_ == 0) return;
    const double latest = static_cast<double>(landed_) / seconds(busy_);
    smoothed_ = measured() ? smoothed_ + kSmoothing * (latest - smoothed_) : latest;
    landed_ = 0;
    busy_ = {};
  }

  bool measured() const { return smoothed_ > 0; }
  double bytes_per_second() const { return smoothed_; }
  // The smoothed value, or less while the source stalls.
  double bytes_per_second_now() const {
    if (busy_ < kStallGrace) return smoothed_;
    const double latest = static_cast<double>(std::max<std::uint64_t>(landed_, 1)) / seconds(busy_);
    return measured() ? std::min(latest, smoothed_) : latest;
  }
  std::uint64_t bytes_since_sample() const { return landed_; }

 private:
  static constexpr Duration kSampleInterval = std::chrono::milliseconds(50);
  static constexpr double kSmoothing = 0.3;

  std::uint64_t landed_ = 0;  // since the last sample
  Duration busy_{0};          // since the last sample
  double smoothed_ = 0;       // 0: not measured yet
};

// Numbers the paths of one batch. A number is never used again.
using PathId = std::uint32_t;

struct LostSource {
  SourceIndex source = 0;
  Error cause;
};

// The sources of one batch and their paths: the slices in flight on each, the speed of each source,
// the path with room, and the loss of sources. A source is lost once its last path has drained;
// only then may it come back.
class BatchSources {
 public:
  enum class PathPhase : std::uint8_t { kTakesSlices, kDraining, kClosed };
  struct Path {
    PathPhase phase = PathPhase::kTakesSlices;
    // Cut for want of speed: its slices go to other sources first.
    bool slow = false;
    // Why the path ends.
    std::string why;
    ErrorCode why_code = ErrorCode::kPeerLost;
    std::vector<SliceIndex> slices;  // in flight
    std::uint64_t bytes_in_flight = 0;
    std::uint64_t bytes_landed = 0;
    // The batch's count of posts at the last one on this path.
    std::uint64_t last_posted = 0;
    PathStats stats;
    std::size_t rail = 0;  // of rails_

    SourceIndex source() const { return stats.source; }
    bool takes_slices() const { return phase == PathPhase::kTakesSlices; }
  };
  enum class Presence : std::uint8_t { kUnknown, kPresent, kLost };
  struct Source {
    Presence presence = Presence::kUnknown;
    std::vector<PathId> paths;  // those that take slices
    // Paths that were aborted and are not closed yet.
    std::size_t draining = 0;
    std::uint64_t bytes_in_flight = 0;
    GoodputMeter goodput;
    int strikes = 0;
    // A verdict on the source goes before the end of one of its paths.
    std::optional<Error> verdict;
    std::optional<Error> last_path_end;
    SourceStats stats;
  };

  explicit BatchSources(const BatchOptions& options) : options_(options), sources_(kMaxSources) {}

  const Source& source(SourceIndex index) const { return sources_[index]; }
  const Path& path(PathId id) const { return paths_[id]; }
  PathId path_count() const { return static_cast<PathId>(paths_.size()); }
  // Sources with a path that takes slices.
  SourceMask living() const { return living_; }
  // Sources with a path that was aborted and is not closed yet.
  SourceMask draining() const;

  PathId add_path(SourceIndex source, std::string description, std::string home,
                  std::string transport);
  // The path takes no slices any more. take_aborts() names it, and path_closed() follows.
  void abort_path(PathId path, ErrorCode code, const std::string& why);
  // The same for a path that was too slow for its slices.
  void abort_slow_path(PathId path, ErrorCode code, const std::string& why);
  // Nothing is in flight on the path: it has drained, or it broke.
  void path_closed(PathId path, const std::string& why);
  // A verdict on the source ends all its paths.
  void lose(SourceIndex source, const Error& cause);
  // A bad slice. Enough of them lose the source.
  void strike(SourceIndex source, const std::string& cause);
  // Ends all paths. From now on no source counts as lost.
  void end_batch();

  // The path of this source with the least in flight, if the source's window has room for `bytes`.
  // One slice always fits on a source with nothing in flight.
  std::optional<PathId> path_with_room(SourceIndex source, std::uint64_t bytes) const;
  void post(PathId path, SliceIndex slice, std::uint64_t bytes, TimePoint now);
  void unpost(PathId path, SliceIndex slice, std::uint64_t bytes, TimePoint now);

  // The count of bytes that have landed on a path. False: nothing is new.
  bool bytes_landed(PathId path, std::uint64_t total);
  void sample_goodput(Duration elapsed);

  void count_landed(PathId path, std::uint64_t bytes);
  void count_failed(PathId path) { ++paths_[path].stats.failures; }
  void count_accepted(SourceIndex source, std::uint64_t bytes);
  void count_fault(SourceIndex source) { ++sources_[source].stats.failures; }

  std::vector<PathId> take_aborts();
  std::vector<LostSource> take_lost();
  // Why the last path or source was lost, for messages.
  const std::string& last_cause() const { return last_cause_; }
  // Fills in the parts of `progress` that are about sources, paths and rails.
  void report(BatchProgress& progress, TimePoint now) const;

 private:
  struct Rail {
    RailStats stats;  // `busy` without the current stretch
    std::size_t slices_in_flight = 0;
    // When the first of them was posted.
    TimePoint busy_since{};

    Duration busy(TimePoint now) const {
      return slices_in_flight > 0 && now > busy_since ? stats.busy + (now - busy_since)
                                                      : stats.busy;
    }
  };
  std::size_t rail_of(const PathStats& path);
  void retire(PathId path, PathPhase phase, const std::string& why);
  void report_lost_if_gone(SourceIndex source);

  const BatchOptions& options_;
  std::vector<Source> sources_;
  std::vector<Path> paths_;
  std::vector<Rail> rails_;
  SourceMask living_;
  std::uint64_t posts_ = 0;
  bool ended_ = false;
  std::string last_cause_ = "no source was connected";
  std::vector<PathId> aborts_;
  std::vector<LostSource> lost_;
};

}  // namespace rekindle::transport
