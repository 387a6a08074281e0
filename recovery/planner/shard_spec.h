#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::planner {

// One rank's place: "tp=3/8", "tp=0/4,pp=1/2", "ep=2/8".
struct ShardPlace {
  struct Axis {
    std::uint32_t rank = 0;
    std::uint32_t size = 1;
    bool operator==(const Axis&) const = default;
  };
  Axis tp, pp, ep;

  static Result<ShardPlace> parse(std::string_view text);
  std::string to_string() const;
};

// Rules (tensor-name pattern → kind and dimension), docs/reference/shard-specs.md. A rule that
// matches nothing, or a tensor that no rule names, is an error, never a guess. File tensors are
// always replicated.
class ShardSpec {
 public:
  static Result<ShardSpec> parse(std::string_view json);
  // Built in for this config.json: chosen by model_type; kNotFound names the ones there are.
  static Result<ShardSpec> builtin(std::string_view config_json);
  static std::vector<std::string> builtin_model_types();

  // The boxes that this place needs. `config_json` gives heads, experts and layers to the rules
  // that need them (kInvalid when it lacks a field that a rule needs).
  Result<std::vector<TensorBox>> boxes(const TensorSet& tensors, std::string_view config_json,
                                       const ShardPlace& place) const;

  struct Rule;

 private:
  static Result<ShardSpec> parse_rules(std::string_view json);

  std::shared_ptr<const std::vector<Rule>> rules_;  // shared, so that Rule may stay incomplete here
  std::string name_;
};

// Whole tensors whose names match a regular expression in RE2's syntax (searched, not anchored),
// plus all file tensors. Linear in the names' length. kInvalid for a bad expression, kNotFound when
// it matches nothing.
Result<std::vector<TensorBox>> boxes_matching(const TensorSet& tensors, std::string_view regex);
std::vector<TensorBox> whole_boxes(const TensorSet& tensors);

}  // namespace rekindle::planner
