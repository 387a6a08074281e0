"""Small models of several kinds, and checkpoints of them on disk."""
import torch
import transformers


def llama(tied=False, layers=2):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=250, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=tied))


def qwen3_moe(tied=True):
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        vocab_size=250, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=128,
        tie_word_embeddings=tied))


def deepseek_v3(**more):
    """`more`: of its configuration."""
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        vocab_size=250, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, topk_method="noaux_tc",
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        first_k_dense_replace=1, max_position_embeddings=128, **more))


def saved(make, path, version):
    torch.manual_seed(version)
    make().to(torch.bfloat16).save_pretrained(path)
    return path


def published(rekindle, directory, models):
    """(name, version) → directory of each model, published as version 1 and, with other weights, as
    version 2. `models`: name → what makes it."""
    paths = {}
    for name, make in models.items():
        for version in (1, 2):
            path = saved(make, directory / f"{name}-{version}", version)
            rekindle.publish(f"{name}@{version}", path)
            paths[name, version] = path
    return paths


def without(path, name, to):
    """A copy of a checkpoint that lacks a tensor."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_bytes((path / "config.json").read_bytes())
    return to
