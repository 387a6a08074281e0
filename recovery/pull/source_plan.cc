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
  for (const PlanSource& source : inputs.sources) {
    views.push_back({source.layout.get(), source.growing ? growing_hold : nullptr,
                     source.proves_parts && !source.growing});
  }
  planner::PlanRequest request;
  request.checkpoint = inputs.checkpoint.get();
  request.destination = inputs.destination.get();
  request.sources = views;
  request.have = inputs.verified ? &*inputs.verified : nullptr;
  planner::PlanOptions options;
  if (inputs.trades) {
    options.slice_bytes = std::clamp(inputs.destination->payload_bytes() / kSlicesToTrade,
                                     kLeastSliceBytes, options.slice_bytes);
    options.bucket_bytes = 4 * options.slice_bytes;
  }
  return planner::plan_pull(request, options);
}

std::vector<SliceIndex> unreadable(const planner::Plan& plan,
                                   const std::vector<GrowingHold>& growing) {
  transport::SourceMask mask;
  for (const GrowingHold& hold : growing) mask.set(hold.source);
  swarm::Availability availability(plan, mask);
  for (const GrowingHold& hold : growing) {
    availability.add_source(hold.source, *hold.layout, false);
    availability.extend(hold.source, hold.held.ranges());
  }
  std::vector<SliceIndex> slices;
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    if (availability.candidates(slice).empty()) slices.push_back(slice);
  }
  return slices;
}

// A plan, and all that it refers to.
struct PlanWithTables {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const Layout> destination;
  std::vector<PlanSource> sources;
  std::unique_ptr<planner::Plan> plan;
};

}  // namespace

std::vector<PlanSource> plan_sources(const SourceTable& sources) {
  std::vector<PlanSource> list;
  for (const ActiveSource& source : sources) {
    list.push_back({source.layout, source.held.has_value(), source.proves_parts()});
  }
  return list;
}

Result<std::shared_ptr<const planner::Plan>> plan_over(const PlanInputs& inputs) {
  const bool any_growing = std::ranges::any_of(inputs.sources, &PlanSource::growing);
  const TileSet nothing(inputs.checkpoint->tiles.tile_count());
  TRY(auto plan, plan_with(inputs, &nothing));
  const bool complete_sources_do = plan->missing().empty() || plan->slice_count() > 0;
  if (!complete_sources_do && any_growing) {
    TRY(plan, plan_with(inputs, nullptr));
  }
  auto all = std::make_shared<PlanWithTables>();
  all->checkpoint = inputs.checkpoint;
  all->destination = inputs.destination;
  all->sources = inputs.sources;
  all->plan = std::move(plan);
  return std::shared_ptr<const planner::Plan>(all, all->plan.get());
}

std::vector<GrowingHold> growing_holds(const SourceTable& sources) {
  std::vector<GrowingHold> holds;
  for (SourceIndex i = 0; i < sources.size(); ++i) {
    if (sources[i].held) holds.push_back({i, sources[i].layout, *sources[i].held});
  }
  return holds;
}

bool nothing_readable(const planner::Plan& plan, const std::vector<GrowingHold>& growing) {
  return unreadable(plan, growing).size() == plan.slice_count();
}

std::vector<planner::MissingBox> held_by_nobody(const planner::Plan& plan,
                                                const Checkpoint& checkpoint,
                                                const std::vector<GrowingHold>& growing) {
  const TileMap& map = checkpoint.tiles;
  std::vector<planner::MissingBox> missing;
  std::vector<TileIndex> tiles;
  for (const SliceIndex slice : unreadable(plan, growing)) {
    if (missing.size() >= kMissingListed) break;
    plan.tiles_read(slice, tiles);
    for (const TileIndex tile : tiles) missing.push_back({map.tensor_of(tile), map.tile_box(tile)});
  }
  return missing;
}

std::vector<NamedSource> named_sources(const SourceTable& sources) {
  std::vector<NamedSource> named;
  for (const ActiveSource& source : sources) {
    named.push_back({source.name, source.record.node().control_endpoint()});
  }
  return named;
}

PlanSummary summarize_plan(const planner::Plan& plan, const PullTarget& target,
                           const std::vector<NamedSource>& sources) {
  const Checkpoint& checkpoint = *target.checkpoint;
  PlanSummary summary;
  summary.id = target.resolved.id;
  summary.root = target.resolved.root;
  summary.wanted_bytes = target.layout().payload_bytes();
  summary.wire_bytes = plan.wire_bytes();
  summary.slices = plan.slice_count();
  summary.buckets = plan.bucket_count();
  for (SourceIndex i = 0; i < sources.size(); ++i) {
    PlanSummary::PerSource line{sources[i].name, sources[i].endpoint, 0};
    for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
      if (plan.candidates(slice).test(i)) line.bytes_available += plan.slice_bytes(slice);
    }
    summary.sources.push_back(std::move(line));
  }
  for (const LayoutEntry& entry : target.layout().entries()) {
    const TensorInfo& info = checkpoint.tensors[entry.tensor];
    summary.wanted.push_back({info.name, std::string(dtype_name(info.dtype)),
                              info.shape.to_string(), entry.box.to_string(),
                              entry.box.elements() * dtype_size_bytes(info.dtype)});
  }
  summary.tensors = count_tensors(checkpoint.tensors, target.layout());
  for (const auto& missing : plan.missing()) {
    summary.missing.push_back(checkpoint.tensors[missing.tensor].name + missing.box.to_string());
  }
  summary.wanted_total = summary.wanted.size();
  summary.missing_total = summary.missing.size();
  return summary;
}

}  // namespace rekindle::pull
