#include "recovery/pull/wanted.h"

#include <algorithm>

#include "recovery/planner/shard_spec.h"

namespace rekindle::pull {

std::string WantedSpec::to_string() const {
  if (!tensors_regex.empty()) return "tensors=" + tensors_regex;
  return shard.empty() ? "whole" : shard;
}

Result<std::vector<TensorBox>> wanted_boxes(const WantedSpec& spec, const Checkpoint& checkpoint,
                                            const std::string& config_json) {
  if (!spec.tensors_regex.empty()) {
    if (!spec.shard.empty()) {
      return fail(ErrorCode::kInvalid, "--tensors and --shard exclude each other");
    }
    return planner::boxes_matching(checkpoint.tensors, spec.tensors_regex);
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

bool covers(const Layout& layout, const std::vector<TensorBox>& boxes) {
  return std::all_of(boxes.begin(), boxes.end(), [&](const TensorBox& wanted) {
    const auto entries = layout.entries_of(wanted.tensor);
    return std::any_of(entries.begin(), entries.end(),
                       [&](const LayoutEntry& entry) { return contains(entry.box, wanted.box); });
  });
}

}  // namespace rekindle::pull
