#pragma once

#include <cstdint>
#include <optional>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/schedule/batch_sources.h"
#include "transport/schedule/slice_table.h"

namespace rekindle::transport {

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
