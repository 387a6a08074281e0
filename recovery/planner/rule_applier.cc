#include "recovery/planner/rule_applier.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

namespace rekindle::planner {

namespace {

std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) {
  return value / by + (value % by != 0);
}

// [rank * step, (rank + 1) * step), cut off at `limit`.
Range clipped(std::uint64_t rank, std::uint64_t step, std::uint64_t limit) {
  const std::uint64_t begin = std::min(rank * step, limit);
  return {begin, std::min(begin + step, limit)};
}

}  // namespace

// The remainder goes to the stages before the last one, which already has the output layer. vLLM
// cuts in the same way.
Range stage_layers(std::uint64_t layers, const ShardPlace::Axis& pp) {
  const std::uint64_t base = layers / pp.size;
  const std::uint64_t extra = layers % pp.size;
  // Stages [size - 1 - extra, size - 1) have one more.
  const std::uint64_t first_larger = pp.size - 1 - extra;
  const auto begin_of = [&](std::uint64_t stage) {
    return stage * base +
           (stage > first_larger ? std::min<std::uint64_t>(stage - first_larger, extra) : 0);
  };
  return {begin_of(pp.rank), begin_of(pp.rank + std::uint64_t{1})};
}

Range rank_experts(std::uint64_t experts, const ShardPlace::Axis& ep) {
  const std::uint64_t base = experts / ep.size;
  const std::uint64_t extra = experts % ep.size;
  const std::uint64_t begin = ep.rank * base + std::min<std::uint64_t>(ep.rank, extra);
  return {begin, begin + base + (ep.rank < extra)};
}

Result<void> RuleApplier::prepare() {
  if (place_.pp.size == 1) return {};
  TRY(layers_, config_.number({0, {"num_hidden_layers", "n_layer"}}));
  extra_layers_ = config_.number({0, {"num_nextn_predict_layers"}}).value_or(0);
  if (layers_ < place_.pp.size) {
    return fail(ErrorCode::kInvalid, "pp={}/{}: the model has {} layers only", place_.pp.rank,
                place_.pp.size, layers_);
  }
  return {};
}

Result<bool> RuleApplier::on_this_stage(const Rule& rule, const Pattern::Match& match) const {
  const ShardPlace::Axis& pp = place_.pp;
  if (pp.size == 1) return true;
  const bool last = pp.rank + 1 == pp.size;
  if (match.layer) {
    if (*match.layer >= layers_) {
      if (*match.layer - layers_ < extra_layers_) return last;
      return fail(ErrorCode::kInvalid, "layer {} is beyond num_hidden_layers {}", *match.layer,
                  layers_);
    }
    const Range range = stage_layers(layers_, pp);
    return *match.layer >= range.begin && *match.layer < range.end;
  }
  switch (rule.stage) {
    case Rule::Stage::kAll:
      return true;
    case Rule::Stage::kFirst:
      return pp.rank == 0;
    case Rule::Stage::kLast:
      return last;
    case Rule::Stage::kEmbedding:
      return pp.rank == 0 || (last && config_.flag("tie_word_embeddings"));
  }
  return true;
}

Result<std::vector<Range>> RuleApplier::even_ranges(const Rule& rule, std::uint64_t extent) const {
  const ShardPlace::Axis& tp = place_.tp;
  if (extent % rule.parts != 0) {
    return fail(ErrorCode::kInvalid, "{} elements are not {} equal parts", extent, rule.parts);
  }
  const std::uint64_t part = extent / rule.parts;
  if (part % rule.unit != 0) {
    return fail(ErrorCode::kInvalid, "{} elements are no multiple of {}", part, rule.unit);
  }
  const std::uint64_t units = part / rule.unit;
  if (!rule.padded && units % tp.size != 0) {
    return fail(ErrorCode::kInvalid, "{} elements in units of {} do not divide by tp={}", part,
                rule.unit, tp.size);
  }
  const Range own = clipped(tp.rank, ceil_div(units, tp.size) * rule.unit, part);
  std::vector<Range> ranges;
  for (std::uint64_t i = 0; i < rule.parts; ++i) {
    ranges.push_back({i * part + own.begin, i * part + own.end});
  }
  return ranges;
}

Result<Range> RuleApplier::head_range(std::uint64_t extent, std::uint64_t heads,
                                      bool replicate) const {
  const ShardPlace::Axis& tp = place_.tp;
  if (extent % heads != 0) {
    return fail(ErrorCode::kInvalid, "{} elements are not {} heads", extent, heads);
  }
  const std::uint64_t head = extent / heads;
  if (heads % tp.size == 0) return clipped(tp.rank, heads / tp.size * head, extent);
  if (!replicate || tp.size % heads != 0) {
    return fail(ErrorCode::kInvalid, "{} heads do not divide by tp={}", heads, tp.size);
  }
  return clipped(tp.rank / (tp.size / heads), head, extent);
}

// [all q | all k | all v]: nq + 2 × nkv heads of one size.
Result<std::vector<Range>> RuleApplier::qkv_ranges(const Rule& rule, std::uint64_t extent) const {
  TRY(const std::uint64_t q_heads, config_.number(rule.heads));
  TRY(const std::uint64_t kv_heads, config_.number(rule.kv_heads));
  const std::uint64_t heads = q_heads + 2 * kv_heads;
  if (extent % heads != 0) {
    return fail(ErrorCode::kInvalid, "{} elements are not {} + 2 × {} heads", extent, q_heads,
                kv_heads);
  }
  const std::uint64_t head = extent / heads;
  TRY(const Range q, head_range(q_heads * head, q_heads, false));
  TRY(const Range kv, head_range(kv_heads * head, kv_heads, true));
  const std::uint64_t k_at = q_heads * head;
  const std::uint64_t v_at = k_at + kv_heads * head;
  return std::vector<Range>{q, {k_at + kv.begin, k_at + kv.end}, {v_at + kv.begin, v_at + kv.end}};
}

// The part of a dimension of this extent that a tp rank takes.
Result<std::vector<Range>> RuleApplier::ranges(const Rule& rule, std::uint64_t extent) const {
  switch (rule.kind) {
    case Rule::Kind::kSplit:
    case Rule::Kind::kExperts:
      return even_ranges(rule, extent);
    case Rule::Kind::kHeads:
    case Rule::Kind::kKvHeads: {
      TRY(const std::uint64_t heads, config_.number(rule.heads));
      TRY(const Range range, head_range(extent, heads, rule.kind == Rule::Kind::kKvHeads));
      return std::vector<Range>{range};
    }
    case Rule::Kind::kQkv:
      return qkv_ranges(rule, extent);
    case Rule::Kind::kVocab: {
      const std::uint64_t padded = ceil_div(extent, rule.pad_to) * rule.pad_to;
      return std::vector<Range>{clipped(place_.tp.rank, ceil_div(padded, place_.tp.size), extent)};
    }
    case Rule::Kind::kReplicate:
    case Rule::Kind::kScale:
      break;
  }
  return std::vector<Range>{{0, extent}};
}

// Splits `box` along the rule's dimension.
Result<void> RuleApplier::cut(const Rule& rule, const Box& box, std::vector<Box>& out) const {
  if (!rule.dim || place_.tp.size == 1) {
    out.push_back(box);
    return {};
  }
  const std::size_t dim = *rule.dim;
  if (dim >= box.rank()) {
    return fail(ErrorCode::kInvalid, "there is no dimension {}", dim);
  }
  auto wanted = ranges(rule, box.extent[dim]);
  if (!wanted)
    return fail(std::move(wanted).error().with_context(fmt::format("dimension {}", dim)));
  for (const Range& range : *wanted) {
    if (range.begin == range.end) continue;
    Box piece = box;
    piece.offset[dim] += range.begin;
    piece.extent[dim] = range.end - range.begin;
    if (!out.empty() && out.back().offset[dim] + out.back().extent[dim] == piece.offset[dim]) {
      out.back().extent[dim] += piece.extent[dim];
    } else {
      out.push_back(piece);
    }
  }
  return {};
}

// With ep, this rank has its experts whole, like engines that place whole experts. Without ep, all
// experts are split by tp.
Result<void> RuleApplier::apply_experts(const Rule& rule, const Pattern::Match& match,
                                        const Shape& shape, std::vector<Box>& out) const {
  TRY(const std::uint64_t experts, config_.number(rule.count));
  Box box = Box::whole(shape);
  if (match.expert && *match.expert >= experts) {
    return fail(ErrorCode::kInvalid, "expert {} is beyond the {} of config.json", *match.expert,
                experts);
  }
  if (rule.expert_dim && (*rule.expert_dim >= shape.rank() || shape[*rule.expert_dim] != experts)) {
    return fail(ErrorCode::kInvalid, "dimension {} does not have the {} experts of config.json",
                *rule.expert_dim, experts);
  }
  if (place_.ep.size == 1) return cut(rule, box, out);
  const Range range = rank_experts(experts, place_.ep);
  if (match.expert) {
    if (*match.expert >= range.begin && *match.expert < range.end) out.push_back(box);
    return {};
  }
  box.offset[*rule.expert_dim] = range.begin;
  box.extent[*rule.expert_dim] = range.end - range.begin;
  if (range.begin < range.end) out.push_back(box);
  return {};
}

Result<void> RuleApplier::apply(const Rule& rule, const Pattern::Match& match, TensorIndex tensor,
                                std::vector<Box>& out) const {
  const Shape& shape = tensors_[tensor].shape;
  const auto in_context = [&](Error error) {
    return fail(std::move(error).with_context(
        fmt::format("{}: tensor '{}' {}", rule.label, tensors_[tensor].name, shape.to_string())));
  };
  auto here = on_this_stage(rule, match);
  if (!here) return in_context(std::move(here).error());
  if (!*here) return {};
  auto done = rule.kind == Rule::Kind::kExperts ? apply_experts(rule, match, shape, out)
                                                : cut(rule, Box::whole(shape), out);
  if (!done) return in_context(std::move(done).error());
  return {};
}

Result<void> RuleApplier::apply_scale(const Rule& rule, TensorIndex scale, TensorIndex weight,
                                      std::span<const Box> weight_boxes,
                                      std::vector<Box>& out) const {
  const TensorInfo& info = tensors_[scale];
  const TensorInfo& of = tensors_[weight];
  std::vector<std::uint64_t> block = rule.block;
  if (!rule.block_key.empty()) {
    auto found = config_.numbers(rule.block_key);
    if (!found) return fail(std::move(found).error().with_context(rule.label));
    block = std::move(*found);
  }
  bool fits = info.shape.rank() == of.shape.rank() && block.size() == of.shape.rank();
  for (std::size_t i = 0; fits && i < block.size(); ++i) {
    fits = info.shape[i] == ceil_div(of.shape[i], block[i]);
  }
  if (!fits) {
    return fail(ErrorCode::kInvalid,
                "{}: tensor '{}' {} does not have one scale for each block [{}] of '{}' {}",
                rule.label, info.name, info.shape.to_string(), fmt::join(block, ", "), of.name,
                of.shape.to_string());
  }
  std::vector<Box> open;
  std::vector<Box> rest;
  for (Box box : weight_boxes) {
    for (std::size_t i = 0; i < block.size(); ++i) {
      const std::uint64_t begin = box.offset[i] / block[i];
      const std::uint64_t end = ceil_div(box.offset[i] + box.extent[i], block[i]);
      box.offset[i] = begin;
      box.extent[i] = end - begin;
    }
    // Two boxes of the weight may share a block.
    open.assign(1, box);
    for (const Box& taken : out) {
      rest.clear();
      for (const Box& piece : open) subtract(piece, taken, rest);
      open.swap(rest);
    }
    out.insert(out.end(), open.begin(), open.end());
  }
  return {};
}

}  // namespace rekindle::planner
