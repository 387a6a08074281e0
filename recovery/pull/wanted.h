#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recovery/pull/pull_types.h"
#include "src/base/result.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

namespace rekindle::pull {

// The part of a version that a pull asks for: all of it, a rank's shard, or tensors by name.
struct WantedSpec {
  std::string shard;          // "tp=3/8"; "" = whole
  std::string spec_json;      // rules; "" = built in by config.json's model_type
  std::string tensors_regex;  // excludes the others
  // Excludes the others as well. A box without a name is the smallest tensor, for callers that only
  // want to know what the version consists of.
  std::vector<NamedBox> boxes = {};

  auto operator<=>(const WantedSpec&) const = default;
  bool needs_config() const { return tensors_regex.empty() && boxes.empty() && !shard.empty(); }
  std::string to_string() const;  // for status: "tp=3/8", "tensors=…", "whole"
};

// The boxes; `config_json` may be empty when !needs_config().
Result<std::vector<TensorBox>> wanted_boxes(const WantedSpec& spec, const Checkpoint& checkpoint,
                                            const std::string& config_json);

// Their layout in the files of a new copy.
Result<PackedLayout> wanted_layout(const WantedSpec& spec, const Checkpoint& checkpoint,
                                   const std::string& config_json);

// True when `layout` holds every wanted box inside one of its entries.
bool covers(const Layout& layout, const std::vector<TensorBox>& boxes);
bool covers(const Layout& layout, const Layout& wanted);

// A layout of the same segments that consists of exactly these boxes. nullopt: a box does not lie
// in one piece inside an entry of `layout`. kInvalid: boxes overlap.
Result<std::optional<Layout>> view_of(const TensorSet& tensors, const Layout& layout,
                                      std::vector<TensorBox> boxes);

}  // namespace rekindle::pull
