// The built-in shard specs, in the language of docs/reference/shard-specs.md: fragments that
// families share, joined to one JSON text per model_type. Names are those of the published
// checkpoints.
#include <algorithm>
#include <array>
#include <string>

#include <fmt/format.h>

#include "recovery/planner/shard_rule.h"

namespace rekindle::planner {

namespace {

constexpr std::string_view kEnds = R"(
  {"match": "model.embed_tokens.weight", "kind": "vocab", "dim": 0, "stage": "embedding"},
  {"match": "model.norm.weight", "kind": "replicate", "stage": "last"},
  {"match": "lm_head.weight", "kind": "vocab", "dim": 0, "stage": "last", "optional": true},
  {"match": "model.layers.{layer}.{input|post_attention}_layernorm.weight", "kind": "replicate"},
  {"match": "model.layers.{layer}.self_attn.rotary_emb.inv_freq", "kind": "replicate",
   "optional": true})";

// Grouped-query attention: K and V heads are shared where there are fewer of them than ranks.
constexpr std::string_view kAttention = R"(,
  {"match": "model.layers.{layer}.self_attn.q_proj.weight",
   "kind": "heads", "dim": 0, "heads": "num_attention_heads"},
  {"match": "model.layers.{layer}.self_attn.{k|v}_proj.weight",
   "kind": "kv_heads", "dim": 0, "heads": "num_key_value_heads|num_attention_heads"},
  {"match": "model.layers.{layer}.self_attn.o_proj.weight",
   "kind": "heads", "dim": 1, "heads": "num_attention_heads"},
  {"match": "model.layers.{layer}.self_attn.q_proj.bias",
   "kind": "heads", "dim": 0, "heads": "num_attention_heads", "optional": true},
  {"match": "model.layers.{layer}.self_attn.{k|v}_proj.bias", "optional": true,
   "kind": "kv_heads", "dim": 0, "heads": "num_key_value_heads|num_attention_heads"},
  {"match": "model.layers.{layer}.self_attn.o_proj.bias", "kind": "replicate", "optional": true})";

constexpr std::string_view kHeadNorms = R"(,
  {"match": "model.layers.{layer}.self_attn.{q|k}_norm.weight", "kind": "replicate"})";

constexpr std::string_view kMlp = R"(,
  {"match": "model.layers.{layer}.mlp.{gate|up}_proj.weight", "kind": "split", "dim": 0},
  {"match": "model.layers.{layer}.mlp.down_proj.weight", "kind": "split", "dim": 1},
  {"match": "model.layers.{layer}.mlp.{gate|up}_proj.bias", "kind": "split", "dim": 0,
   "optional": true},
  {"match": "model.layers.{layer}.mlp.down_proj.bias", "kind": "replicate", "optional": true})";

// Layers without experts, which only some mixture models have.
constexpr std::string_view kSomeMlp = R"(,
  {"match": "model.layers.{layer}.mlp.{gate|up}_proj.weight", "kind": "split", "dim": 0,
   "optional": true},
  {"match": "model.layers.{layer}.mlp.down_proj.weight", "kind": "split", "dim": 1,
   "optional": true})";

constexpr std::string_view kExperts = R"(,
  {"match": "model.layers.{layer}.mlp.gate.weight", "kind": "replicate"},
  {"match": "model.layers.{layer}.mlp.experts.{expert}.{gate|up}_proj.weight",
   "kind": "experts", "count": "num_experts|n_routed_experts", "dim": 0},
  {"match": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
   "kind": "experts", "count": "num_experts|n_routed_experts", "dim": 1})";

constexpr std::string_view kQwenSharedExpert = R"(,
  {"match": "model.layers.{layer}.mlp.shared_expert.{gate|up}_proj.weight",
   "kind": "split", "dim": 0},
  {"match": "model.layers.{layer}.mlp.shared_expert.down_proj.weight", "kind": "split", "dim": 1},
  {"match": "model.layers.{layer}.mlp.shared_expert_gate.weight", "kind": "replicate"})";

constexpr std::string_view kMixtralExperts = R"(,
  {"match": "model.layers.{layer}.block_sparse_moe.gate.weight", "kind": "replicate"},
  {"match": "model.layers.{layer}.block_sparse_moe.experts.{expert}.{w1|w3}.weight",
   "kind": "experts", "count": "num_local_experts", "dim": 0},
  {"match": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
   "kind": "experts", "count": "num_local_experts", "dim": 1})";

// Multi-head latent attention: the low-rank halves are shared by all heads, the others are per
// head. The last group belongs to the multi-token prediction layer behind the model's own.
constexpr std::string_view kDeepseek = R"(,
  {"match": "model.layers.{layer}.self_attn.{q|q_b|kv_b}_proj.weight",
   "kind": "heads", "dim": 0, "heads": "num_attention_heads"},
  {"match": ["model.layers.{layer}.self_attn.q_a_proj.{weight|bias}",
             "model.layers.{layer}.self_attn.q_a_layernorm.weight"],
   "kind": "replicate", "optional": true},
  {"match": ["model.layers.{layer}.self_attn.kv_a_proj_with_mqa.{weight|bias}",
             "model.layers.{layer}.self_attn.kv_a_layernorm.weight"], "kind": "replicate"},
  {"match": "model.layers.{layer}.self_attn.o_proj.weight",
   "kind": "heads", "dim": 1, "heads": "num_attention_heads"},
  {"match": "model.layers.{layer}.self_attn.o_proj.bias", "kind": "replicate", "optional": true},
  {"match": "model.layers.{layer}.mlp.gate.e_score_correction_bias", "kind": "replicate",
   "optional": true},
  {"match": "model.layers.{layer}.mlp.shared_experts.{gate|up}_proj.weight",
   "kind": "split", "dim": 0, "optional": true},
  {"match": "model.layers.{layer}.mlp.shared_experts.down_proj.weight", "kind": "split", "dim": 1,
   "optional": true},
  {"match": ["model.layers.{layer}.{enorm|hnorm|eh_proj}.weight",
             "model.layers.{layer}.shared_head.norm.weight"],
   "kind": "replicate", "optional": true},
  {"match": "model.layers.{layer}.{embed_tokens|shared_head.head}.weight",
   "kind": "vocab", "dim": 0, "optional": true})";

constexpr std::string_view kBlockScales = R"(,
  {"match": "model.layers.{layer}.**.weight_scale_inv", "kind": "scale", "of": "weight",
   "block": "quantization_config.weight_block_size", "optional": true})";

// All experts of a layer lie in one tensor. Gate and up rows take turns, so a contiguous range of
// them is a range of both. MXFP4: 32 elements share a scale, so ranks get whole groups of 32, and
// the last ones less where these do not divide. The bias after `down` is added once, by one rank.
constexpr std::string_view kGptOss = R"(,
  {"match": "model.layers.{layer}.self_attn.sinks",
   "kind": "heads", "dim": 0, "heads": "num_attention_heads"},
  {"match": "model.layers.{layer}.mlp.router.{weight|bias}", "kind": "replicate"},
  {"match": "model.layers.{layer}.mlp.experts.gate_up_proj_{blocks|scales|bias}",
   "kind": "experts", "count": "num_local_experts", "expert_dim": 0, "dim": 1, "unit": 64,
   "padded": true},
  {"match": "model.layers.{layer}.mlp.experts.down_proj_{blocks|scales}", "optional": true,
   "kind": "experts", "count": "num_local_experts", "expert_dim": 0, "dim": 2, "padded": true},
  {"match": "model.layers.{layer}.mlp.experts.down_proj_bias",
   "kind": "experts", "count": "num_local_experts", "expert_dim": 0},
  {"match": "model.layers.{layer}.mlp.experts.gate_up_proj", "optional": true,
   "kind": "experts", "count": "num_local_experts", "expert_dim": 0, "dim": 2, "unit": 64,
   "padded": true},
  {"match": "model.layers.{layer}.mlp.experts.down_proj", "optional": true,
   "kind": "experts", "count": "num_local_experts", "expert_dim": 0, "dim": 1, "unit": 32,
   "padded": true})";

constexpr std::string_view kBert = R"(
  {"match": ["{|bert.}embeddings.{word|position|token_type}_embeddings.weight",
             "{|bert.}embeddings.LayerNorm.{weight|bias|gamma|beta}"],
   "kind": "replicate", "stage": "first"},
  {"match": "{|bert.}embeddings.{position|token_type}_ids", "kind": "replicate", "stage": "first",
   "optional": true},
  {"match": "{|bert.}encoder.layer.{layer}.attention.self.{query|key|value}.{weight|bias}",
   "kind": "heads", "dim": 0, "heads": "num_attention_heads"},
  {"match": "{|bert.}encoder.layer.{layer}.attention.output.dense.weight",
   "kind": "heads", "dim": 1, "heads": "num_attention_heads"},
  {"match": "{|bert.}encoder.layer.{layer}.intermediate.dense.{weight|bias}",
   "kind": "split", "dim": 0},
  {"match": "{|bert.}encoder.layer.{layer}.output.dense.weight", "kind": "split", "dim": 1},
  {"match": ["{|bert.}encoder.layer.{layer}.{attention.|}output.dense.bias",
             "{|bert.}encoder.layer.{layer}.{attention.|}output.LayerNorm.{weight|bias|gamma|beta}"],
   "kind": "replicate"},
  {"match": ["{|bert.}pooler.dense.{weight|bias}", "cls.**", "classifier.{weight|bias}",
             "qa_outputs.{weight|bias}"],
   "kind": "replicate", "stage": "last", "optional": true})";

struct Family {
  std::string_view model_type;
  std::vector<std::string_view> fragments;
};

const std::vector<Family>& families() {
  static const std::vector<Family> table = {
      {"bert", {kBert}},
      {"deepseek_v2", {kEnds, kDeepseek, kSomeMlp, kExperts, kBlockScales}},
      {"deepseek_v3", {kEnds, kDeepseek, kSomeMlp, kExperts, kBlockScales}},
      {"gpt_oss", {kEnds, kAttention, kGptOss}},
      {"kimi_k2", {kEnds, kDeepseek, kSomeMlp, kExperts, kBlockScales}},
      {"llama", {kEnds, kAttention, kMlp, kBlockScales}},
      {"mistral", {kEnds, kAttention, kMlp, kBlockScales}},
      {"mixtral", {kEnds, kAttention, kMixtralExperts, kBlockScales}},
      {"qwen2", {kEnds, kAttention, kMlp, kBlockScales}},
      {"qwen2_moe", {kEnds, kAttention, kSomeMlp, kExperts, kQwenSharedExpert, kBlockScales}},
      {"qwen3", {kEnds, kAttention, kHeadNorms, kMlp, kBlockScales}},
      {"qwen3_moe", {kEnds, kAttention, kHeadNorms, kSomeMlp, kExperts, kBlockScales}},
  };
  return table;
}

}  // namespace

std::string builtin_spec(std::string_view model_type) {
  for (const Family& family : families()) {
    if (family.model_type != model_type) continue;
    std::string text = fmt::format("{{\"name\": \"{}\", \"rules\": [", model_type);
    for (const std::string_view fragment : family.fragments) text += fragment;
    return text + "]}";
  }
  return {};
}

std::vector<std::string> ShardSpec::builtin_model_types() {
  std::vector<std::string> types;
  for (const Family& family : families()) types.emplace_back(family.model_type);
  return types;
}

}  // namespace rekindle::planner
