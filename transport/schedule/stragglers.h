#pragma once

#include <optional>

#include "transport/schedule/batch_sources.h"
#include "transport/schedule/progress_watch.h"
#include "transport/schedule/reroute.h"
#include "transport/schedule/slice_table.h"

namespace rekindle::transport {

// How the end of a batch is kept from waiting for slow sources. Near the end, a source gets no
// slice that the others would finish much sooner. A slice that is stuck at a slow source while a
// fast one idles is stolen.
class Stragglers {
 public:
  Stragglers(const SliceTable& slices, const BatchSources& sources, const Reroutes& reroutes,
             const BatchOptions& options)
      : slices_(slices), sources_(sources), reroutes_(reroutes), options_(options) {}

  // Would the others fetch all open slices long before `source` fetched this one?
  bool others_finish_sooner(SourceIndex source, SliceIndex slice, const SliceInfo& info) const;
  // Whether `source` has nothing in flight and is known to be fast enough to steal.
  bool can_steal(SourceIndex source) const;
  // A path whose slices `thief` would fetch much sooner.
  std::optional<PathId> find_victim(SourceIndex thief) const;

 private:
  bool is_victim(PathId path, SourceIndex thief) const;

  const SliceTable& slices_;
  const BatchSources& sources_;
  const Reroutes& reroutes_;
  const BatchOptions& options_;
};

}  // namespace rekindle::transport
