#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "recovery/planner/model_config.h"
#include "recovery/planner/name_pattern.h"
#include "recovery/planner/shard_spec.h"
#include "src/base/result.h"

namespace rekindle::planner {

// One rule, as docs/reference/shard-specs.md describes it.
struct ShardSpec::Rule {
  enum class Kind { kReplicate, kSplit, kHeads, kKvHeads, kQkv, kVocab, kExperts, kScale };
  // The stages of the pipeline that have a tensor without {layer}.
  enum class Stage { kAll, kFirst, kLast, kEmbedding };

  // "rule 3 ('model.norm.weight')", for errors.
  std::string label;
  std::vector<Pattern> patterns;
  Kind kind = Kind::kReplicate;
  Stage stage = Stage::kAll;
  bool optional = false;
  std::optional<std::size_t> dim;         // that tp splits
  std::uint64_t parts = 1;                // kSplit, kExperts: sub-blocks along dim, each split
  std::uint64_t unit = 1;                 // kSplit, kExperts: elements that stay together
  bool padded = false;                    // kSplit, kExperts: the last ranks may get less
  ConfigValue heads;                      // kHeads, kKvHeads, kQkv
  ConfigValue kv_heads;                   // kQkv
  std::uint64_t pad_to = 64;              // kVocab
  ConfigValue count;                      // kExperts
  std::optional<std::size_t> expert_dim;  // kExperts: of a tensor that has all of them
  std::string of;                         // kScale: last part of the name of the weight
  std::vector<std::uint64_t> block;       // kScale: elements of the weight per scale, by dimension
  std::string block_key;                  // kScale: the same from config.json
};

Result<ShardSpec::Rule> parse_rule(const nlohmann::json& json, std::size_t number);

// The rules for a model_type as a JSON shard spec; "" when there are none.
std::string builtin_spec(std::string_view model_type);

}  // namespace rekindle::planner
