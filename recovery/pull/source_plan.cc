#include "recovery/pull/source_plan.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "recovery/swarm/availability.h"

namespace rekindle::pull {

using transport::SliceIndex;
using transport::SourceIndex;

namespace {

constexpr std::size_t kMissingListed = 64;
constexpr std::uint64_t kSlicesToTrade = 1024;
constexpr std::uint64_t kLeastSliceBytes = 1 << 20;

// `growing_hold`: the tiles that growing sources are taken to hold. Null: all of their layout.
Result<std::unique_ptr<planner::Plan>> plan_with(const PlanInputs& inputs,
                                                 const TileSet* growing_hold) {
  std::vector<planner::SourceView> views;
  for (const auto& source : inputs.sources) {
    views.push_back({source.layout.get(), source.held ? growing_hold : nullptr});
  }
  planner::PlanRequest request;
  request.checkpoint = &inputs.checkpoint;
  request.destination = &inputs.destination;
  request.sources = views;
  const TileSet have = inputs.verified != nullptr ? inputs.verified->snapshot() : TileSet();
  request.have = inputs.verified != nullptr ? &have : nullptr;
  planner::PlanOptions options;
  if (inputs.trades) {
    options.slice_bytes = std::clamp(inputs.destination.payload_bytes() / kSlicesToTrade,
                                     kLeastSliceBytes, options.slice_bytes);
    options.bucket_bytes = 4 * options.slice_bytes;
  }
  return planner::plan_pull(request, options);
}

std::vector<SliceIndex> unreadable(const planner::Plan& plan, const SourceTable& sources) {
  swarm::Availability availability(plan, growing_sources(sources));
  for (SourceIndex i = 0; i < sources.size(); ++i) {
    const ActiveSource& source = sources[i];
    if (!source.held) continue;
    availability.add_source(i, *source.layout);
    availability.extend(i, source.held->ranges());
  }
  std::vector<SliceIndex> slices;
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    if (availability.candidates(slice).empty()) slices.push_back(slice);
  }
  return slices;
}

}  // namespace

Result<std::unique_ptr<planner::Plan>> plan_over(const PlanInputs& inputs) {
  const TileSet nothing(inputs.checkpoint.tiles.tile_count());
  TRY(auto plan, plan_with(inputs, &nothing));
  const bool complete_sources_do = plan->missing().empty() || plan->slice_count() > 0;
  if (complete_sources_do || !any_growing(inputs.sources)) return plan;
  return plan_with(inputs, nullptr);
}

bool nothing_readable(const planner::Plan& plan, const SourceTable& sources) {
  return unreadable(plan, sources).size() == plan.slice_count();
}

std::vector<planner::MissingBox> held_by_nobody(const planner::Plan& plan,
                                                const PlanInputs& inputs) {
  const TileMap& map = inputs.checkpoint.tiles;
  std::vector<planner::MissingBox> missing;
  std::vector<TileIndex> tiles;
  for (const SliceIndex slice : unreadable(plan, inputs.sources)) {
    if (missing.size() >= kMissingListed) break;
    plan.tiles_read(slice, tiles);
    for (const TileIndex tile : tiles) missing.push_back({map.tensor_of(tile), map.tile_box(tile)});
  }
  return missing;
}

PlanSummary summarize_plan(const planner::Plan& plan, const PullTarget& target,
                           const SourceTable& sources) {
  const Checkpoint& checkpoint = *target.checkpoint;
  PlanSummary summary;
  summary.id = target.resolved.id;
  summary.root = target.resolved.root;
  summary.wanted_bytes = target.packed->layout.payload_bytes();
  summary.wire_bytes = plan.wire_bytes();
  summary.slices = plan.slice_count();
  summary.buckets = plan.bucket_count();
  for (SourceIndex i = 0; i < sources.size(); ++i) {
    const ActiveSource& source = sources[i];
    PlanSummary::PerSource line{source.name, source.record.node().control_endpoint(), 0};
    for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
      if (plan.candidates(slice).test(i)) line.bytes_available += plan.slice_bytes(slice);
    }
    summary.sources.push_back(std::move(line));
  }
  for (const auto& [tensor, box] : target.wanted) {
    const TensorInfo& info = checkpoint.tensors[tensor];
    summary.wanted.push_back({info.name, std::string(dtype_name(info.dtype)),
                              info.shape.to_string(), box.to_string(),
                              box.elements() * dtype_size_bytes(info.dtype)});
  }
  summary.tensors = count_tensors(checkpoint.tensors, target.packed->layout);
  for (const auto& missing : plan.missing()) {
    summary.missing.push_back(checkpoint.tensors[missing.tensor].name + missing.box.to_string());
  }
  summary.wanted_total = summary.wanted.size();
  summary.missing_total = summary.missing.size();
  return summary;
}

}  // namespace rekindle::pull
