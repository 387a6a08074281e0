#pragma once

#include <memory>
#include <vector>

#include "recovery/planner/plan.h"
#include "recovery/pull/pull_context.h"
#include "recovery/pull/source_table.h"
#include "src/tensor/checkpoint.h"

// The plan of a pull over the sources that it has. Pure.
namespace rekindle::pull {

struct PlanInputs {
  const Checkpoint& checkpoint;
  const Layout& destination;
  const SourceTable& sources;
  const VerifiedTiles* verified = nullptr;  // null: nothing is here yet
  // This host serves on what it has: small copies are cut into small pieces, so that there are
  // enough of them to trade.
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
