#include "tests/planner/model_tensors.h"

#include <cstdint>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace rekindle::planner::testing {

namespace {

class Maker {
 public:
  explicit Maker(std::string_view config_json) : config_(nlohmann::json::parse(config_json)) {
    type_ = config_["model_type"];
    hidden_ = get("hidden_size");
    heads_ = get("num_attention_heads");
    kv_heads_ = get("num_key_value_heads", heads_);
    head_ = get("head_dim", hidden_ / heads_);
    fp8_ = config_.contains("quantization_config") && type_ != "gpt_oss";
  }

  std::vector<TensorInfo> run() {
    if (type_ == "bert") {
      bert();
      return std::move(tensors_);
    }
    add("model.embed_tokens.weight", {get("vocab_size"), hidden_});
    add("model.norm.weight", {hidden_});
    if (!config_.value("tie_word_embeddings", false)) {
      add("lm_head.weight", {get("vocab_size"), hidden_});
    }
    for (std::uint64_t i = 0; i < get("num_hidden_layers"); ++i) layer(i);
    for (std::uint64_t i = 0; i < get("num_nextn_predict_layers", 0); ++i) {
      const std::uint64_t number = get("num_hidden_layers") + i;
      const std::string at = fmt::format("model.layers.{}.", number);
      layer(number);
      add(at + "enorm.weight", {hidden_});
      add(at + "hnorm.weight", {hidden_});
      add(at + "eh_proj.weight", {hidden_, 2 * hidden_});
      add(at + "shared_head.norm.weight", {hidden_});
      add(at + "shared_head.head.weight", {get("vocab_size"), hidden_});
      add(at + "embed_tokens.weight", {get("vocab_size"), hidden_});
    }
    return std::move(tensors_);
  }

 private:
  std::uint64_t get(const char* key, std::optional<std::uint64_t> otherwise = {}) const {
    if (otherwise && (!config_.contains(key) || config_[key].is_null())) return *otherwise;
    return config_.at(key).get<std::uint64_t>();
  }

  void add(const std::string& name, Shape shape, DType dtype = DType::kBF16) {
    tensors_.push_back({name, dtype, shape});
  }

  void linear(const std::string& name, std::uint64_t rows, std::uint64_t columns,
              bool bias = false) {
    add(name + ".weight", {rows, columns}, fp8_ ? DType::kF8E4M3 : DType::kBF16);
    if (fp8_) {
      add(name + ".weight_scale_inv", {(rows + 127) / 128, (columns + 127) / 128}, DType::kF32);
    }
    if (bias) add(name + ".bias", {rows});
  }

  void mlp(const std::string& at, std::uint64_t intermediate) {
    linear(at + "gate_proj", intermediate, hidden_);
    linear(at + "up_proj", intermediate, hidden_);
    linear(at + "down_proj", hidden_, intermediate);
  }

  void layer(std::uint64_t number) {
    const std::string at = fmt::format("model.layers.{}.", number);
    add(at + "input_layernorm.weight", {hidden_});
    add(at + "post_attention_layernorm.weight", {hidden_});
    if (type_ == "deepseek_v2" || type_ == "deepseek_v3" || type_ == "kimi_k2") {
      latent_attention(at + "self_attn.");
      deepseek_mlp(at + "mlp.", number);
      return;
    }
    attention(at + "self_attn.");
    if (type_ == "gpt_oss") {
      gpt_oss_experts(at + "mlp.");
    } else if (type_ == "mixtral") {
      mixtral_experts(at + "block_sparse_moe.");
    } else if (type_ == "qwen2_moe" || type_ == "qwen3_moe") {
      qwen_experts(at + "mlp.");
    } else {
      mlp(at + "mlp.", get("intermediate_size"));
    }
  }

  void attention(const std::string& at) {
    const bool oss = type_ == "gpt_oss";
    const bool bias = oss || type_.starts_with("qwen2");
    linear(at + "q_proj", heads_ * head_, hidden_, bias);
    linear(at + "k_proj", kv_heads_ * head_, hidden_, bias);
    linear(at + "v_proj", kv_heads_ * head_, hidden_, bias);
    linear(at + "o_proj", hidden_, heads_ * head_, oss);
    if (oss) add(at + "sinks", {heads_});
    if (type_.starts_with("qwen3")) {
      add(at + "q_norm.weight", {head_});
      add(at + "k_norm.weight", {head_});
    }
  }

  void latent_attention(const std::string& at) {
    const std::uint64_t rope = get("qk_rope_head_dim");
    const std::uint64_t nope = get("qk_nope_head_dim");
    const std::uint64_t value = get("v_head_dim");
    const std::uint64_t kv_rank = get("kv_lora_rank");
    const std::uint64_t q_rank = get("q_lora_rank", 0);
    if (q_rank == 0) {
      linear(at + "q_proj", heads_ * (nope + rope), hidden_);
    } else {
      linear(at + "q_a_proj", q_rank, hidden_);
      add(at + "q_a_layernorm.weight", {q_rank});
      linear(at + "q_b_proj", heads_ * (nope + rope), q_rank);
    }
    linear(at + "kv_a_proj_with_mqa", kv_rank + rope, hidden_);
    add(at + "kv_a_layernorm.weight", {kv_rank});
    linear(at + "kv_b_proj", heads_ * (nope + value), kv_rank);
    linear(at + "o_proj", hidden_, heads_ * value);
  }

  void deepseek_mlp(const std::string& at, std::uint64_t number) {
    if (number < get("first_k_dense_replace")) return mlp(at, get("intermediate_size"));
    const std::uint64_t experts = get("n_routed_experts");
    const std::uint64_t intermediate = get("moe_intermediate_size");
    add(at + "gate.weight", {experts, hidden_});
    if (type_ != "deepseek_v2") add(at + "gate.e_score_correction_bias", {experts}, DType::kF32);
    for (std::uint64_t i = 0; i < experts; ++i) {
      mlp(fmt::format("{}experts.{}.", at, i), intermediate);
    }
    mlp(at + "shared_experts.", intermediate * get("n_shared_experts"));
  }

  void qwen_experts(const std::string& at) {
    add(at + "gate.weight", {get("num_experts"), hidden_});
    for (std::uint64_t i = 0; i < get("num_experts"); ++i) {
      mlp(fmt::format("{}experts.{}.", at, i), get("moe_intermediate_size"));
    }
    if (type_ == "qwen3_moe") return;
    mlp(at + "shared_expert.", get("shared_expert_intermediate_size"));
    add(at + "shared_expert_gate.weight", {1, hidden_});
  }

  void mixtral_experts(const std::string& at) {
    add(at + "gate.weight", {get("num_local_experts"), hidden_});
    for (std::uint64_t i = 0; i < get("num_local_experts"); ++i) {
      const std::string expert = fmt::format("{}experts.{}.", at, i);
      linear(expert + "w1", get("intermediate_size"), hidden_);
      linear(expert + "w2", hidden_, get("intermediate_size"));
      linear(expert + "w3", get("intermediate_size"), hidden_);
    }
  }

  void gpt_oss_experts(const std::string& at) {
    const std::uint64_t experts = get("num_local_experts");
    const std::uint64_t inner = get("intermediate_size");
    add(at + "router.weight", {experts, hidden_});
    add(at + "router.bias", {experts});
    const std::string all = at + "experts.";
    add(all + "gate_up_proj_bias", {experts, 2 * inner});
    add(all + "down_proj_bias", {experts, hidden_});
    if (config_.contains("quantization_config")) {
      add(all + "gate_up_proj_blocks", {experts, 2 * inner, hidden_ / 32, 16}, DType::kU8);
      add(all + "gate_up_proj_scales", {experts, 2 * inner, hidden_ / 32}, DType::kU8);
      add(all + "down_proj_blocks", {experts, hidden_, inner / 32, 16}, DType::kU8);
      add(all + "down_proj_scales", {experts, hidden_, inner / 32}, DType::kU8);
    } else {
      add(all + "gate_up_proj", {experts, hidden_, 2 * inner});
      add(all + "down_proj", {experts, inner, hidden_});
    }
  }

  void norm(const std::string& name) {
    add(name + ".weight", {hidden_}, DType::kF32);
    add(name + ".bias", {hidden_}, DType::kF32);
  }

  void bert_linear(const std::string& name, std::uint64_t rows, std::uint64_t columns) {
    add(name + ".weight", {rows, columns}, DType::kF32);
    add(name + ".bias", {rows}, DType::kF32);
  }

  void bert() {
    add("embeddings.position_ids", {1, get("max_position_embeddings")}, DType::kI64);
    add("embeddings.word_embeddings.weight", {get("vocab_size"), hidden_}, DType::kF32);
    add("embeddings.position_embeddings.weight", {get("max_position_embeddings"), hidden_},
        DType::kF32);
    add("embeddings.token_type_embeddings.weight", {2, hidden_}, DType::kF32);
    norm("embeddings.LayerNorm");
    const std::uint64_t inner = get("intermediate_size");
    for (std::uint64_t i = 0; i < get("num_hidden_layers"); ++i) {
      const std::string at = fmt::format("encoder.layer.{}.", i);
      for (const char* name : {"query", "key", "value"}) {
        bert_linear(at + "attention.self." + name, hidden_, hidden_);
      }
      bert_linear(at + "attention.output.dense", hidden_, hidden_);
      norm(at + "attention.output.LayerNorm");
      bert_linear(at + "intermediate.dense", inner, hidden_);
      bert_linear(at + "output.dense", hidden_, inner);
      norm(at + "output.LayerNorm");
    }
    bert_linear("pooler.dense", hidden_, hidden_);
  }

  nlohmann::json config_;
  std::string type_;
  std::uint64_t hidden_ = 0, heads_ = 0, kv_heads_ = 0, head_ = 0;
  bool fp8_ = false;
  std::vector<TensorInfo> tensors_;
};

constexpr std::string_view kBlockFp8 = R"("quantization_config":
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},)";

constexpr std::string_view kLatent = R"(
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_attention_heads": 16, "hidden_size": 1024, "intermediate_size": 2048,
    "moe_intermediate_size": 512, "n_shared_experts": 1, "n_routed_experts": 16,
    "first_k_dense_replace": 1, "num_hidden_layers": 4, "vocab_size": 1000)";

}  // namespace

std::vector<TensorInfo> model_tensors(std::string_view config_json) {
  return Maker(config_json).run();
}

std::string small_config(std::string_view type) {
  const std::string head = fmt::format(R"({{"model_type": "{}", )", type);
  if (type == "deepseek_v2") {  // as V2-Lite: no low-rank queries
    return head + fmt::format(R"("q_lora_rank": null, {}}})", kLatent);
  }
  if (type == "deepseek_v3") {
    return head + fmt::format(R"({} "q_lora_rank": 768, "num_nextn_predict_layers": 1, {}}})",
                              kBlockFp8, kLatent);
  }
  if (type == "kimi_k2") {
    return head + fmt::format(R"({} "q_lora_rank": 768, "num_nextn_predict_layers": 0, {}}})",
                              kBlockFp8, kLatent);
  }
  if (type == "gpt_oss") {
    return head + R"("hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 2010,
        "num_local_experts": 6, "quantization_config": {"quant_method": "mxfp4"}})";
  }
  if (type == "bert") {
    return head + R"("hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12,
        "num_hidden_layers": 6, "vocab_size": 3052, "max_position_embeddings": 512})";
  }
  const std::string experts = R"("num_experts": 12, "moe_intermediate_size": 256,
      "shared_expert_intermediate_size": 1024, )";
  return head + (type.ends_with("_moe") ? experts : "") +
         (type == "mixtral" ? R"("num_local_experts": 8, )" : "") +
         (type == "qwen3" ? R"("head_dim": 128, "tie_word_embeddings": true, )" : "") +
         R"("hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
         "num_key_value_heads": 4, "num_hidden_layers": 5, "vocab_size": 1007})";
}

std::string kimi_k2_config() {
  return R"({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "first_k_dense_replace": 1, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 163840, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": false, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
    "activation_scheme": "dynamic", "weight_block_size": [128, 128]}})";
}

}  // namespace rekindle::planner::testing
