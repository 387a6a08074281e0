#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "recovery/planner/plan.h"
#include "recovery/swarm/availability.h"
#include "transport/engine.h"

namespace rekindle::pull {

// Which sources may bring which slice of a plan, and by which reads. Sources that are being filled
// join while the plan runs, and are candidates for the slices that they hold by then. The control
// thread makes the changes; any thread may ask.
class SliceCandidates {
 public:
  // `growing`: sources of the plan that hold nothing until extend() or complete() says so.
  // `suspicion`: how often tiles of several sources have failed together in this pull. Above 0 the
  // candidates of each group of slices are one source only, and another one each time: so a bad
  // source shows itself.
  SliceCandidates(std::shared_ptr<const planner::Plan> plan, transport::SourceMask growing,
                  std::uint32_t suspicion);

  const planner::Plan& plan() const { return *plan_; }

  // A source that the plan may not know. It holds nothing yet.
  void add_source(transport::SourceIndex source, std::shared_ptr<const Layout> layout);
  // Both return the slices that the source has become a candidate for.
  std::vector<transport::SliceIndex> extend(transport::SourceIndex source,
                                            const swarm::TileRuns& held);
  std::vector<transport::SliceIndex> complete(transport::SourceIndex source);

  transport::SliceInfo info(transport::SliceIndex slice) const;
  void expand(transport::SliceIndex slice, transport::SourceIndex source,
              planner::Expansion& out) const;
  // The source that alone can have brought all slices from `first` to `last`.
  std::optional<transport::SourceIndex> only_source(transport::SliceIndex first,
                                                    transport::SliceIndex last) const;

 private:
  transport::SourceMask chosen_for_group(transport::SliceIndex slice) const;

  const std::shared_ptr<const planner::Plan> plan_;
  const transport::SourceMask growing_;
  const std::uint32_t suspicion_;
  swarm::Availability availability_;
  mutable std::mutex mutex_;
  std::map<transport::SourceIndex, std::shared_ptr<const Layout>> added_;  // guarded by mutex_
};

}  // namespace rekindle::pull
