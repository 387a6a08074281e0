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

// Slices are cut by what is held completely, and sources that are being filled join in where they
// can (swarm::Availability). Only where complete sources have nothing left to give the others
// decide, by what they are going to hold.
Result<std::unique_ptr<planner::Plan>> plan_over(const PlanInputs& inputs);

// Whether no source holds all that any slice of the plan reads, as of now.
bool nothing_readable(const planner::Plan& plan, const SourceTable& sources);
// Boxes of slices that no source can give as of now: some of them.
std::vector<planner::MissingBox> held_by_nobody(const planner::Plan& plan,
                                                const PlanInputs& inputs);

// For pull --dry-run.
PlanSummary summarize_plan(const planner::Plan& plan, const PullTarget& target,
                           const SourceTable& sources);

}  // namespace rekindle::pull
