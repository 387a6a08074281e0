#include "recovery/pull/wanted.h"

#include <algorithm>
#include <limits>

#include "recovery/planner/shard_spec.h"
#include "src/base/units.h"
#include "src/store/segment_store.h"

namespace rekindle::pull {

std::string WantedSpec::to_string() const {
  if (!tensors_regex.empty()) return "tensors=" + tensors_regex;
  if (!boxes.empty()) return fmt::format("{} boxes", boxes.size());
  return shard.empty() ? "whole" : shard;
}

namespace {

// The smallest tensor with bytes, if there is one.
std::optional<TensorIndex> smallest(const TensorSet& tensors) {
  const auto all = tensors.tensors();
  const auto found = std::ranges::min_element(all, {}, [](const TensorInfo& tensor) {
    const std::uint64_t bytes = tensor.size_bytes();
    return bytes > 0 ? bytes : std::numeric_limits<std::uint64_t>::max();
  });
  if (found == all.end()) return std::nullopt;
  return static_cast<TensorIndex>(found - all.begin());
}

Result<std::vector<TensorBox>> named_boxes(const std::vector<NamedBox>& named,
                                           const Checkpoint& checkpoint) {
  std::vector<TensorBox> boxes;
  for (const auto& [tensor, offset, extent] : named) {
    const auto index =
        tensor.empty() ? smallest(checkpoint.tensors) : checkpoint.tensors.find(tensor);
    if (!index && tensor.empty()) {
      return fail(ErrorCode::kNotFound, "{} has no tensors", checkpoint.id.to_string());
    }
    if (!index) {
      return fail(ErrorCode::kNotFound, "{} has no tensor '{}'", checkpoint.id.to_string(), tensor);
    }
    const Shape& shape = checkpoint.tensors[*index].shape;
    const bool whole = offset.rank() == 0 && extent.rank() == 0;
    const Box box = whole ? Box::whole(shape) : Box{offset, extent};
    if (auto fits = check_box(box, shape); !fits) {
      return fail(std::move(fits).error().with_context("box of tensor '" + tensor + "'"));
    }
    boxes.push_back({*index, box});
  }
  std::sort(boxes.begin(), boxes.end());
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  return boxes;
}

}  // namespace

Result<std::vector<TensorBox>> wanted_boxes(const WantedSpec& spec, const Checkpoint& checkpoint,
                                            const std::string& config_json) {
  if (!spec.tensors_regex.empty()) {
    if (!spec.shard.empty()) {
      return fail(ErrorCode::kInvalid, "--tensors and --shard exclude each other");
    }
    return planner::boxes_matching(checkpoint.tensors, spec.tensors_regex);
  }
  if (!spec.boxes.empty()) {
    if (!spec.shard.empty()) {
      return fail(ErrorCode::kInvalid, "boxes and a shard exclude each other: name one of them");
    }
    return named_boxes(spec.boxes, checkpoint);
  }
  if (spec.shard.empty()) {
    if (!spec.spec_json.empty()) {
      return fail(ErrorCode::kInvalid, "--spec says how to cut, --shard which piece: give both");
    }
    return planner::whole_boxes(checkpoint.tensors);
  }
  TRY(const auto place, planner::ShardPlace::parse(spec.shard));
  if (spec.spec_json.empty() && config_json.empty()) {
    return fail(ErrorCode::kInvalid,
                "{} carries no config.json, so its model type is unknown: give --spec FILE with "
                "shard rules",
                checkpoint.id.to_string());
  }
  TRY(const auto rules, spec.spec_json.empty() ? planner::ShardSpec::builtin(config_json)
                                               : planner::ShardSpec::parse(spec.spec_json));
  return rules.boxes(checkpoint.tensors, config_json, place);
}

Result<PackedLayout> wanted_layout(const WantedSpec& spec, const Checkpoint& checkpoint,
                                   const std::string& config_json) {
  TRY(const auto boxes, wanted_boxes(spec, checkpoint, config_json));
  return pack_layout(checkpoint.tensors, boxes, store::kMaxSegmentBytes);
}

namespace {

bool covers_box(const Layout& layout, TensorIndex tensor, const Box& box) {
  return std::ranges::any_of(layout.entries_of(tensor),
                             [&](const LayoutEntry& entry) { return contains(entry.box, box); });
}

}  // namespace

bool covers(const Layout& layout, const std::vector<TensorBox>& boxes) {
  return std::ranges::all_of(boxes, [&](const TensorBox& wanted) {
    return covers_box(layout, wanted.tensor, wanted.box);
  });
}

bool covers(const Layout& layout, const Layout& wanted) {
  return std::ranges::all_of(wanted.entries(), [&](const LayoutEntry& entry) {
    return covers_box(layout, entry.tensor, entry.box);
  });
}

Result<std::optional<Layout>> view_of(const TensorSet& tensors, const Layout& layout,
                                      std::vector<TensorBox> boxes) {
  using View = std::optional<Layout>;
  std::sort(boxes.begin(), boxes.end());
  std::vector<LayoutEntry> entries;
  std::vector<StridedCopy> pieces;
  for (const TensorBox& wanted : boxes) {
    const auto held = layout.entries_of(wanted.tensor);
    const auto entry = std::find_if(held.begin(), held.end(), [&](const LayoutEntry& candidate) {
      return contains(candidate.box, wanted.box);
    });
    if (entry == held.end()) return View();
    pieces.clear();
    if (!wanted.box.empty()) {
      strided_copies(wanted.box, entry->box, wanted.box,
                     dtype_size_bytes(tensors[wanted.tensor].dtype), pieces);
      if (pieces.size() != 1 || pieces.front().count != 1) return View();
    }
    const std::uint64_t inside = pieces.empty() ? 0 : pieces.front().src_offset;
    entries.push_back({wanted.tensor, wanted.box, entry->segment, entry->offset_bytes + inside});
  }
  const auto segments = layout.segments();
  TRY(auto view, Layout::create(tensors, {segments.begin(), segments.end()}, std::move(entries)));
  return View(std::move(view));
}

}  // namespace rekindle::pull
