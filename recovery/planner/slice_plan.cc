#include "recovery/planner/slice_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include "recovery/planner/builder.h"
#include "recovery/planner/plan_table.h"
#include "src/base/units.h"
#include "src/tensor/canonical.h"

namespace rekindle::planner {

namespace {

Result<void> check_request(const PlanRequest& request, const PlanOptions& options) {
  if (request.checkpoint == nullptr || request.destination == nullptr) {
    return fail(ErrorCode::kInvalid, "plan: a checkpoint and a destination layout are needed");
  }
  const TileIndex tiles = request.checkpoint->tiles.tile_count();
  const auto fits = [&](const Layout& layout) {
    return layout.entries().empty() ||
           layout.entries().back().tensor < request.checkpoint->tensors.size();
  };
  if (request.sources.size() > transport::kMaxSources) {
    return fail(ErrorCode::kInvalid, "plan: {} sources, the most at a time is {}",
                request.sources.size(), transport::kMaxSources);
  }
  if (!fits(*request.destination) || (request.have != nullptr && request.have->size() != tiles)) {
    return fail(ErrorCode::kInvalid, "plan {}: the destination belongs to another checkpoint",
                request.checkpoint->id.to_string());
  }
  for (std::size_t i = 0; i < request.sources.size(); ++i) {
    const SourceView& source = request.sources[i];
    if (source.layout == nullptr || !fits(*source.layout) ||
        (source.held != nullptr && source.held->size() != tiles)) {
      return fail(ErrorCode::kInvalid, "plan {}: source {} belongs to another checkpoint",
                  request.checkpoint->id.to_string(), i);
    }
  }
  if (options.slice_bytes == 0 || options.bucket_bytes == 0 || options.max_partial_overhead < 1) {
    return fail(ErrorCode::kInvalid,
                "plan: slice_bytes and bucket_bytes must be positive, max_partial_overhead at "
                "least 1");
  }
  return {};
}

// The bytes of all tensors of which the destination wants some part.
std::uint64_t largest_tile(const PlanRequest& request) {
  std::uint64_t largest = 1;
  for (const LayoutEntry& entry : request.destination->entries()) {
    if (largest >= kMaxTileBytes) break;
    const DType dtype = request.checkpoint->tensors[entry.tensor].dtype;
    largest =
        std::max(largest, request.checkpoint->tiles.grid(entry.tensor).tile_extent().product() *
                              dtype_size_bytes(dtype));
  }
  return largest;
}

std::string name_missing(const Checkpoint& checkpoint, const MissingBox& missing) {
  const TensorInfo& info = checkpoint.tensors[missing.tensor];
  const std::uint64_t bytes = missing.box.elements() * dtype_size_bytes(info.dtype);
  if (missing.box == Box::whole(info.shape)) {
    return fmt::format("{} ({}) is held by no source", canonical::printable(info.name),
                       format_bytes(bytes));
  }
  return fmt::format("{}{} ({} of {}) is held by no source", canonical::printable(info.name),
                     missing.box.to_string(), format_bytes(bytes), format_bytes(info.size_bytes()));
}

}  // namespace

Result<std::unique_ptr<Plan>> plan_pull(const PlanRequest& request, const PlanOptions& options) {
  TRY_VOID(check_request(request, options));
  auto plan = std::make_unique<PlanTable>();
  plan->checkpoint = request.checkpoint;
  plan->destination = request.destination;
  plan->options = options;
  plan->options.slice_bytes = std::max(options.slice_bytes, largest_tile(request));
  plan->options.bucket_bytes = std::max(options.bucket_bytes, plan->options.slice_bytes);
  for (const SourceView& source : request.sources) plan->sources.push_back(source.layout);
  Builder(request, *plan).run();
  return plan;
}

void coalesce(std::vector<MissingBox>& boxes) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    MissingBox next = boxes[i];
    while (kept > 0 && boxes[kept - 1].tensor == next.tensor) {
      const auto both = joined(boxes[kept - 1].box, next.box);
      if (!both) break;
      next.box = *both;
      --kept;
    }
    boxes[kept++] = next;
  }
  boxes.resize(kept);
}

std::string describe_missing(const Checkpoint& checkpoint, std::span<const MissingBox> missing,
                             std::size_t limit) {
  std::string text;
  std::size_t tensors = 0;
  for (std::size_t i = 0; i < missing.size(); ++i) {
    if (i > 0 && missing[i].tensor == missing[i - 1].tensor) continue;
    if (++tensors > limit) continue;
    std::size_t end = i + 1;
    while (end < missing.size() && missing[end].tensor == missing[i].tensor) ++end;
    if (!text.empty()) text += "; ";
    text += name_missing(checkpoint, missing[i]);
    if (end - i > 1) text += fmt::format(" (and {} more parts of it)", end - i - 1);
  }
  if (tensors > limit) {
    text += fmt::format("{}and {} more", text.empty() ? "" : "; ", tensors - limit);
  }
  return text;
}

}  // namespace rekindle::planner
