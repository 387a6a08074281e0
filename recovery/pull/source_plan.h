#pragma once

#include <memory>
#include <vector>

#include "recovery/planner/slice_plan.h"
#include "recovery/pull/pull_context.h"
#include "recovery/pull/source_table.h"
#include "src/tensor/checkpoint.h"

// Plans a pull over its current sources. Pure.
namespace rekindle::pull {

struct PlanInputs {
  const Checkpoint& checkpoint;
  const Layout& destination;
  const SourceTable& sources;
  const VerifiedTiles* verified = nullptr;  // null: nothing is here yet
  // This host serves the bytes that it has received. Small copies are then cut into small slices,
  // so that pullers have enough of them to trade.
  bool trades = false;
};

// Complete sources decide how the slices are cut, and growing ones join in where they can
// (swarm::Availability). Only where complete sources have nothing left to give, the slices are cut
// by the tiles that growing sources are going to hold.
Result<std::unique_ptr<planner::Plan>> plan_over(const PlanInputs& inputs);

// Whether no slice of the plan can be read from any source as of now.
bool nothing_readable(const planner::Plan& plan, const SourceTable& sources);
// Boxes of slices that cannot be read as of now; a long list is cut.
std::vector<planner::MissingBox> held_by_nobody(const planner::Plan& plan,
                                                const PlanInputs& inputs);

// For pull --dry-run.
PlanSummary summarize_plan(const planner::Plan& plan, const PullTarget& target,
                           const SourceTable& sources);

}  // namespace rekindle::pull
