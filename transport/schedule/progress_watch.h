#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/schedule/batch_sources.h"
#include "transport/schedule/slice_table.h"

namespace rekindle::transport {

// When each path and each source sent its last byte, and which of them have been silent for too
// long.
//
// A source that sends nothing on any path loses all its paths at once, the idle ones, too: its
// slices would only wait for the same silence on the next path. Where each path is a NIC, one NIC
// may be silent alone. All paths go when a second one is silent.
class ProgressWatch {
 public:
  ProgressWatch(const BatchSources& sources, const BatchOptions& options)
      : sources_(sources), options_(options), source_progress_(kMaxSources) {}

  void path_added(SourceIndex source, TimePoint now);
  // Call this before the slice counts as in flight on `path`.
  void slice_will_be_posted(PathId path, TimePoint now);
  void byte_landed(PathId path, TimePoint now);
  void slice_landed(PathId path, TimePoint now);
  // This process was stopped: no deadline ran meanwhile.
  void forgive(Duration pause);

  struct Overdue {
    PathId path = 0;
    ErrorCode code = ErrorCode::kTimeout;
    std::string why;
  };
  // The paths that are to be aborted now. kUnavailable: nobody has needed the path for a while.
  std::vector<Overdue> overdue(TimePoint now);

  // Whether the source has sent something in the last half of its deadline.
  bool is_sending(SourceIndex source, TimePoint now) const;
  TimePoint last_byte() const { return last_byte_; }

 private:
  struct SourceProgress {
    // The last byte from it, or its first slice in flight.
    TimePoint last{};
    // A path was cut for its silence, and nothing has come since.
    bool suspect = false;
  };

  const BatchSources& sources_;
  const BatchOptions& options_;
  std::vector<TimePoint> path_progress_;
  std::vector<SourceProgress> source_progress_;
  TimePoint last_byte_{};
};

// Whether open slices lack a source, and for how long.
//
// A slice starves when no living source holds it and none that is being filled may get it. A source
// that still drains counts as living: its loss is reported before the starvation that follows.
class StarvationWatch {
 public:
  StarvationWatch(const SliceTable& slices, const BatchSources& sources,
                  const BatchOptions& options)
      : slices_(slices), sources_(sources), options_(options) {}

  void path_added(TimePoint now);
  // The slice is open again.
  void slice_reopened(const SliceInfo& info);
  // Sources that are being filled have gained slices, or may gain some.
  void prospects_changed();
  void candidates_gained(TimePoint now);
  void slice_posted() { waiting_since_.reset(); }

  // `waiting`: everything that somebody holds has come, and the rest depends on sources that are
  // being filled. Returns the error that ends the batch, once a deadline has passed.
  std::optional<Error> tick(bool waiting, TimePoint now);
  void forgive(Duration pause);

  // How many slices starve: once when it begins, and again after each path that did not help.
  std::optional<std::uint64_t> take();

 private:
  void recount(TimePoint now);
  std::optional<Error> check_prospects(bool waiting, TimePoint now);

  const SliceTable& slices_;
  const BatchSources& sources_;
  const BatchOptions& options_;
  bool recount_wanted_ = true;
  SourceMask living_at_recount_;
  std::uint64_t starving_ = 0;
  std::optional<TimePoint> starving_since_;
  bool untold_ = false;
  // Since when the batch waits for sources that are being filled.
  std::optional<TimePoint> waiting_since_;
};

}  // namespace rekindle::transport
