#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recovery/pull/pull_types.h"
#include "src/base/result.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

namespace rekindle::pull {

// What a pull asks for: all, a rank's shard, or tensors by name.
struct WantedSpec {
  std::string shard;          // "tp=3/8"; "" = whole
  std::string spec_json;      // rules; "" = built in by config.json's model_type
  std::string tensors_regex;  // excludes the others
  // Likewise. One without a name is the smallest tensor: for who wants to know what there is.
  std::vector<NamedBox> boxes = {};

  bool needs_config() const { return tensors_regex.empty() && boxes.empty() && !shard.empty(); }
  std::string to_string() const;  // for status: "tp=3/8", "tensors=…", "whole"
};

// The boxes; `config_json` may be empty when !needs_config().
Result<std::vector<TensorBox>> wanted_boxes(const WantedSpec& spec, const Checkpoint& checkpoint,
                                            const std::string& config_json);

// True when `layout` holds every wanted box inside one of its entries.
bool covers(const Layout& layout, const std::vector<TensorBox>& boxes);

// The same segments seen as exactly these boxes, when each lies in one piece inside an entry of
// `layout`; nullopt when one does not. kInvalid when they overlap.
Result<std::optional<Layout>> view_of(const TensorSet& tensors, const Layout& layout,
                                      std::vector<TensorBox> boxes);

}  // namespace rekindle::pull
