#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "recovery/planner/shard_rule.h"

namespace rekindle::planner {

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

}  // namespace rekindle::planner
