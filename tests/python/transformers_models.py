"""Small models of real architectures with random weights, the same ones in every process."""
import hashlib

import torch
import transformers

SMALL = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)


def config(name):
    if name in ("llama", "llama_untied"):
        return transformers.LlamaConfig(**SMALL, tie_word_embeddings=name == "llama")
    if name == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False)
    assert name == "deepseek_v3"
    return transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8,
        q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_shared_experts=1)


NAMES = ("llama", "qwen3_moe", "deepseek_v3")


def build(name, seed=5):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(name)).eval()
    model.generation_config.max_length = 37
    return model


def outputs(model):
    """Of the last layer, for the same tokens always."""
    tokens = (torch.arange(24).reshape(2, 12) * 7) % 128
    with torch.no_grad():
        return model(tokens)[0]


def digest(model):
    bits = outputs(model).contiguous().view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()
