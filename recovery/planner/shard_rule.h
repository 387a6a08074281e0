#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "recovery/planner/shard_spec.h"
#include "src/base/result.h"

namespace rekindle::planner {

// A pattern of tensor names, matched from end to end:
//   *            any characters but '.', at least one
//   **           any characters, at least one
//   {layer}      a decimal number, the layer; {expert} likewise; {n} any number
//   {a|b|}       one of these texts; an empty one is allowed
// Everything else stands for itself. docs/reference/shard-specs.md.
class Pattern {
 public:
  struct Match {
    std::optional<std::uint64_t> layer;
    std::optional<std::uint64_t> expert;
  };

  static Result<Pattern> parse(std::string_view text);
  std::optional<Match> match(std::string_view name) const;
  const std::string& text() const { return text_; }
  bool has_layer() const { return has_layer_; }
  bool has_expert() const { return has_expert_; }

 private:
  enum class Token { kText, kWord, kAny, kNumber, kLayer, kExpert, kChoice };
  struct Part {
    Token token = Token::kText;
    std::vector<std::string> texts;  // kText: one; kChoice: several
  };

  Result<void> parse_braces(std::string_view inside);
  bool match_from(std::size_t part, std::string_view rest, Match& found, int& budget) const;
  bool match_number(std::size_t part, std::string_view rest, Match& found, int& budget) const;
  bool match_wildcard(std::size_t part, std::string_view rest, Match& found, int& budget) const;

  std::string text_;
  std::vector<Part> parts_;
  bool has_layer_ = false;
  bool has_expert_ = false;
};

// The message on one line of bounded length. Names and patterns in it come from files and users.
Error one_line(const Error& error);
template <typename T>
Result<T> one_line(Result<T> result) {
  if (!result) return fail(one_line(std::move(result).error()));
  return result;
}

// Strict: refuses more than `max_bytes`, deeper nesting than `max_depth` and duplicate keys. `what`
// begins the error: "shard spec".
Result<nlohmann::json> parse_json(std::string_view text, std::string_view what,
                                  std::size_t max_bytes, int max_depth);

// A number in a rule: written out, or the first of these keys of config.json that is there
// ("a|b.c": keys separated by '|', levels by '.').
struct ConfigValue {
  std::uint64_t literal = 0;
  // Empty: a literal.
  std::vector<std::string> keys;
};

// A model's config.json.
class ModelConfig {
 public:
  static Result<ModelConfig> parse(std::string_view text);

  // kInvalid: no key is there, or its value is not a positive integer.
  Result<std::uint64_t> number(const ConfigValue& value) const;
  // A list of positive integers at `key`.
  Result<std::vector<std::uint64_t>> numbers(const std::string& key) const;
  // False when it is not there.
  bool flag(const char* key) const;
  // "" when it is not there.
  std::string text(const char* key) const;

 private:
  const nlohmann::json* find(std::string_view key) const;
  nlohmann::json json_;
};

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

// The part of one tensor that a place needs: [begin, end) along one dimension.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// Applies rules to tensors for one place.
class RuleApplier {
 public:
  RuleApplier(const TensorSet& tensors, const ModelConfig& config, const ShardPlace& place)
      : tensors_(tensors), config_(config), place_(place) {}

  // Reads the fields of the config that the pipeline axis needs.
  Result<void> prepare();
  // Appends boxes of tensors_[tensor], disjoint; none when another place has it.
  Result<void> apply(const ShardSpec::Rule& rule, const Pattern::Match& match, TensorIndex tensor,
                     std::vector<Box>& out) const;
  // Turns boxes of a weight into those of its block scales.
  Result<void> apply_scale(const ShardSpec::Rule& rule, TensorIndex scale, TensorIndex weight,
                           std::span<const Box> weight_boxes, std::vector<Box>& out) const;

 private:
  using Rule = ShardSpec::Rule;
  Result<bool> on_this_stage(const Rule& rule, const Pattern::Match& match) const;
  Result<std::vector<Range>> ranges(const Rule& rule, std::uint64_t extent) const;
  Result<std::vector<Range>> even_ranges(const Rule& rule, std::uint64_t extent) const;
  Result<Range> head_range(std::uint64_t extent, std::uint64_t heads, bool replicate) const;
  Result<std::vector<Range>> qkv_ranges(const Rule& rule, std::uint64_t extent) const;
  Result<void> apply_experts(const Rule& rule, const Pattern::Match& match, const Shape& shape,
                             std::vector<Box>& out) const;
  Result<void> cut(const Rule& rule, const Box& box, std::vector<Box>& out) const;

  const TensorSet& tensors_;
  const ModelConfig& config_;
  const ShardPlace& place_;
  // num_hidden_layers, with pp only.
  std::uint64_t layers_ = 0;
  // The layers after them, for multi-token prediction.
  std::uint64_t extra_layers_ = 0;
};

// Contiguous ranges: layers of a pipeline stage, experts of an expert-parallel rank.
Range stage_layers(std::uint64_t layers, const ShardPlace::Axis& pp);
Range rank_experts(std::uint64_t experts, const ShardPlace::Axis& ep);

// The rules for a model_type as a JSON shard spec; "" when there are none.
std::string builtin_spec(std::string_view model_type);

}  // namespace rekindle::planner
