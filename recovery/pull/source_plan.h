#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/planner/slice_plan.h"
#include "recovery/pull/pull_context.h"
#include "recovery/pull/source_table.h"
#include "src/tensor/checkpoint.h"

// Plans a pull over its current sources. Pure.
namespace rekindle::pull {

// One source as a plan sees it.
struct PlanSource {
  std::shared_ptr<const Layout> layout;
  // It is being filled.
  bool growing = false;
  // It keeps the proofs of the parts of tiles that it has.
  bool proves_parts = false;
};
std::vector<PlanSource> plan_sources(const SourceTable& sources);

// They own all that a plan needs, so that a plan can be made while the pull goes on or ends.
struct PlanInputs {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const Layout> destination;
  std::vector<PlanSource> sources;
  // The tiles that are here. nullopt: nothing is here yet.
  std::optional<TileSet> verified;
  // This host serves the bytes that it has received. Small copies are then cut into small slices,
  // so that pullers have enough of them to trade.
  bool trades = false;
};

// Complete sources decide how the slices are cut, and growing ones join in where they can
// (swarm::Availability). Only where complete sources have nothing left to give, the slices are cut
// by the tiles that growing sources are going to hold. The plan keeps its checkpoint and layouts.
Result<std::shared_ptr<const planner::Plan>> plan_over(const PlanInputs& inputs);

// What the sources that are being filled hold as of now.
struct GrowingHold {
  transport::SourceIndex source = 0;
  std::shared_ptr<const Layout> layout;
  TileSet held;
};
std::vector<GrowingHold> growing_holds(const SourceTable& sources);

// Whether no slice of the plan can be read from any source as of now.
bool nothing_readable(const planner::Plan& plan, const std::vector<GrowingHold>& growing);
// Boxes of slices that cannot be read as of now; a long list is cut.
std::vector<planner::MissingBox> held_by_nobody(const planner::Plan& plan,
                                                const Checkpoint& checkpoint,
                                                const std::vector<GrowingHold>& growing);

// For pull --dry-run.
struct NamedSource {
  std::string name;
  std::string endpoint;
};
std::vector<NamedSource> named_sources(const SourceTable& sources);
PlanSummary summarize_plan(const planner::Plan& plan, const PullTarget& target,
                           const std::vector<NamedSource>& sources);

}  // namespace rekindle::pull
