"""Load format rekindle under the real SGLang, on the CPU: every parameter bit-identical to what
SGLang's own loader makes of the same checkpoint, at the start and after its own updates."""
import ast
import importlib.util
import json
import os
import pathlib
import re
import socket
import threading

import pytest
import torch

import rekindle as rk
from rekindle.sglang.versions import KEEPING

from . import models
from .models import llama, qwen3_moe, without
from .processes import run_ranks

HERE = pathlib.Path(__file__).parent
PATIENCE_S = 300  # SGLang takes a while to import


def deepseek_v3():
    """With what SGLang's own code needs of its configuration."""
    return models.deepseek_v3(
        moe_layer_freq=1, scoring_func="sigmoid", rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 32})


MODELS = {"llama": llama, "llama-tied": lambda: llama(True),
          "qwen3-moe": lambda: qwen3_moe(tied=False), "deepseek-v3": deepseek_v3}


@pytest.fixture(scope="module")
def checkpoints(rekindle, memory_directory):
    return models.published(rekindle, memory_directory, MODELS)


def run_sglang(rekindle, path, options, world=1, **job):
    """What each rank says."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    options = {"agent": str(rekindle.store("a")), **options}
    jobs = [{"path": str(path), "world": world, "rank": rank, "meeting": meeting,
             "options": options, **job} for rank in range(world)]
    return [{**said, "log": log} for said, log in run_ranks(
        HERE / "sglang_worker.py", jobs, dict(os.environ), PATIENCE_S)]


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_has_what_sglangs_own_loader_gives(rekindle, checkpoints, name):
    """By recorded slices, and from whole tensors. DeepSeek's loader computes from what it loads."""
    said, = run_sglang(rekindle, checkpoints[name, 1], {"model": name, "version": 1},
                       also=[{"record": False}])
    assert said.get("differ") == [], said
    assert said["also"][0]["differ"] == []
    assert said["recorded"] == (name != "deepseek-v3") and not said["also"][0]["recorded"]


@pytest.mark.parametrize("experts", [1, 2])
def test_of_two_ranks_each_fetches_its_half_and_they_update_together(
        rekindle, checkpoints, experts):
    name = "qwen3-moe"
    said = run_sglang(
        rekindle, checkpoints[name, 1], {"model": name, "version": 1, "instance": f"tp2-{experts}"},
        world=2, experts=experts, also=[{"record": False, "instance": f"whole-{experts}"}],
        updates=[{"how": "disk", "path": str(checkpoints[name, 2])}])
    assert [one.get("differ") for one in said] == [[], []], said
    assert said[0]["generation"] == said[1]["generation"] > 0
    for one in said:
        assert one["bytes"] < 0.7 * one["also"][0]["bytes"]
        update, = one["updates"]
        assert update["differ"] == [] and update["version"] == 2, update
        assert update["answer"][0] and update["bytes"] == one["bytes"]
    assert len({one["updates"][0]["generation"] for one in said}) == 1
    assert said[0]["updates"][0]["generation"] > said[0]["generation"]
    if experts == 2:
        found = [{n.split(".")[5] for n in one["names"] if ".experts." in n} for one in said]
        assert found == [set("0123"), set("4567")]


@pytest.mark.parametrize("name, missing", [("deepseek-v3", {"1": [2, 5]}),
                                           ("qwen3-moe", {"0": [1], "1": [3, 7]})])
def test_a_rank_that_lacks_experts_gets_them_while_the_other_does_nothing(
        rekindle, checkpoints, memory_directory, name, missing):
    """By SGLang's own recovery. It loads all of Qwen3-MoE, which names no part of itself."""
    model = f"lacks-{name}"
    first = str(checkpoints[name, 1])
    rekindle.publish(f"{model}@1", first)
    rekindle.publish(f"{model}@2", checkpoints[name, 2])
    said = run_sglang(
        rekindle, first, {"model": model, "version": 1, "instance": model}, world=2, updates=[
            {"how": "recover", "rank": 1, "missing": missing, "path": first}])
    assert [one.get("differ") for one in said] == [[], []], said
    assert "updates" not in said[0] and "error" not in said[1], (said[1]["error"], said[1]["log"])
    update, = said[1]["updates"]
    assert update["differ"] == [] and update["version"] == 1, said
    assert update["generation"] == said[1]["generation"]


def test_two_ranks_that_share_a_draft_agree_on_its_version(rekindle, checkpoints):
    """Also when one of them sees the newest version late."""
    said = run_sglang(
        rekindle, checkpoints["qwen3-moe", 1], {"model": "qwen3-moe", "version": 1}, world=2,
        draft={"model": "llama", "path": str(checkpoints["llama", 2])}, late=["llama", 1])
    assert [one.get("differ") for one in said] == [[], []], said
    drafts = [one["draft"] for one in said]
    assert [one["version"] for one in drafts] == [2, 2]
    assert [one["differ"] for one in drafts] == [[], []]
    whole = len([name for name in drafts[0]["names"] if "norm" not in name])
    assert all(len(one["whole"]) < whole for one in drafts)  # sharded


def save_layers(path, version):
    """Two layers of MiMo-V2's for multi-token prediction, which are all that a draft reads."""
    from safetensors.torch import save_file
    torch.manual_seed(version)
    shapes = {"model.embed_tokens.weight": (250, 64), "lm_head.weight": (250, 64)}
    for layer in range(2):
        name = f"model.mtp.layers.{layer}"
        shapes.update({f"{name}.{norm}.weight": (64,) for norm in (
            "enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")})
        shapes.update({f"{name}.eh_proj.weight": (64, 128),
                       f"{name}.self_attn.q_proj.weight": (64, 64),
                       f"{name}.self_attn.k_proj.weight": (32, 64),
                       f"{name}.self_attn.v_proj.weight": (32, 64),
                       f"{name}.self_attn.o_proj.weight": (64, 64),
                       f"{name}.mlp.gate_proj.weight": (128, 64),
                       f"{name}.mlp.up_proj.weight": (128, 64),
                       f"{name}.mlp.down_proj.weight": (64, 128)})
    path.mkdir()
    save_file({name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
              path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({
        "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "qwen2", "vocab_size": 250,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 128, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "layernorm_epsilon": 1e-5, "attention_bias": False, "hybrid_layer_pattern": [1, 1],
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
        "swa_v_head_dim": 16, "swa_rope_theta": 10000, "sliding_window_size": 32,
        "v_head_dim": 16, "rope_theta": 10000}))
    return path


def test_layers_of_a_draft_have_one_version_each_its_own_weights(
        rekindle, checkpoints, memory_directory):
    """Also when a version is published between them, and after an update, of which SGLang does not
    say to its loader which layer it is for."""
    first, later = (save_layers(memory_directory / f"layers-{version}", version)
                    for version in (1, 2))
    rekindle.publish("mtp@1", first)
    rekindle.publish("mtp@2", later)
    said, = run_sglang(
        rekindle, checkpoints["llama", 1], {"model": "llama", "version": 1, "draft_model": "mtp"},
        layers={"model": "mtp", "path": str(first), "later": str(later), "first": 1})
    assert "error" not in said, (said["error"], said["log"])
    for layer in said["layers"]:
        assert layer["loaded"]["differ"] == [] and layer["loaded"]["version"] == 1
        assert layer["answer"][0], layer
        assert layer["updated"]["differ"] == [] and layer["updated"]["version"] == 2
    names = [{name for name in layer["updated"]["names"] if ".mtp." in name}
             for layer in said["layers"]]
    assert names[0] and names[1]
    assert all(f".{layer}." in name for layer in range(2) for name in names[layer])


def test_a_server_with_sglangs_backup_of_experts_is_refused(rekindle, checkpoints):
    """Its process would read files, by a load format that it does not know, and end unseen."""
    said, = run_sglang(
        rekindle, checkpoints["qwen3-moe", 1], {"model": "qwen3-moe"},
        arguments={"enable_elastic_expert_backup": True, "elastic_ep_backend": "mooncake"})
    kind, text = said["error"]
    assert kind == "InvalidError" and "--enable-elastic-expert-backup" in text, said


def test_drafts_that_keep_their_embeddings_are_those_that_we_know():
    """Of SGLang's sources: where `set_embed_and_head` does not set a draft's own."""
    models_of = pathlib.Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "models"
    keeping = set()
    for path in models_of.glob("*.py"):
        for made in ast.walk(ast.parse(path.read_text())):
            for step in made.body if isinstance(made, ast.ClassDef) else ():
                if getattr(step, "name", None) == "set_embed_and_head" and not re.search(
                        r"_head\(|embed\w*\.weight = ", ast.unparse(ast.Module(step.body, []))):
                    keeping.add(made.name)
    assert keeping == set(KEEPING)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def publish_torn(rekindle, checkpoints, directory, name):
    """A version of llama without one of the three parts of a fused parameter."""
    rekindle.publish(name, without(checkpoints["llama", 2], K_PROJ,
                                   directory / name.replace("@", "-")))


TORN = "model.layers.1.self_attn.qkv_proj.weight (5120 of 6144 elements written)"


def test_a_running_model_is_updated_in_both_ways(rekindle, checkpoints, memory_directory):
    """From disk's place, then by name; one that lacks a tensor is an error, and the next one is
    taken again."""
    publish_torn(rekindle, checkpoints, memory_directory, "torn@1")
    first, later = (str(checkpoints["llama", version]) for version in (1, 2))
    said, = run_sglang(
        rekindle, first, {"model": "llama", "version": 1, "instance": "updated"},
        updates=[{"how": "disk", "path": later},
                 {"how": "tensor", "version": ["llama", 1], "path": first},
                 {"how": "tensor", "version": ["torn", 1]},
                 {"how": "tensor", "version": ["llama", "latest"], "path": later}])
    assert "error" not in said, (said["error"], said["log"])
    disk, named, torn, again = said["updates"]
    for update, version in ((disk, 2), (named, 1), (again, 2)):
        assert update["answer"][0] and update["differ"] == [] and update["torn"] is None, update
        assert update["version"] == version and update["instance"] == "updated"
    generations = [one["generation"] for one in (said, disk, named, again)]
    assert sorted(set(generations)) == generations
    kind, text = torn["error"]
    assert kind == "InvalidError" and TORN in text and "must not serve" in text
    assert TORN in torn["torn"] and torn["version"] == 1  # what the fleet is told


def test_after_an_update_from_disk_that_fails_the_version_of_before_is_back(
        rekindle, checkpoints, memory_directory):
    rekindle.publish("breaks@1", checkpoints["llama", 1])
    publish_torn(rekindle, checkpoints, memory_directory, "breaks@2")
    first = str(checkpoints["llama", 1])
    said, = run_sglang(rekindle, first, {"model": "breaks", "version": 1},
                       also=[{"record": False}], updates=[{"how": "disk", "path": first}])
    assert "error" not in said, (said["error"], said["log"])
    update, = said["updates"]
    done, text = update["answer"]
    assert not done and TORN in text and "must not serve" in text
    assert update["differ"] == [] and update["version"] == 1 and update["torn"] is None


@pytest.mark.parametrize("record", [True, False])
def test_a_parameter_that_no_tensor_is_for_is_an_error_that_names_it(
        rekindle, checkpoints, memory_directory, record):
    name = f"holes-{record}"
    publish_torn(rekindle, checkpoints, memory_directory, f"{name}@1")
    said, = run_sglang(rekindle, checkpoints["llama", 1], {"model": name, "record": record})
    kind, text = said["error"]
    assert kind == "InvalidError" and TORN in text


def save_adapter(path):
    """Of the attention of llama's layers."""
    from safetensors.torch import save_file
    torch.manual_seed(7)
    tensors = {}
    for layer in range(2):
        for part, rows in (("q_proj", 64), ("k_proj", 16), ("v_proj", 16)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, 64, dtype=torch.bfloat16)
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 4, dtype=torch.bfloat16)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [
            "q_proj", "k_proj", "v_proj"]}))
    return path


def test_an_adapter_is_loaded_beside_a_model_which_then_is_updated(
        rekindle, checkpoints, memory_directory):
    """Adapters are files. SGLang's manager wraps layers of the model that it has of Rekindle."""
    adapter = save_adapter(memory_directory / "adapter")
    first, later = (str(checkpoints["llama", version]) for version in (1, 2))
    said, = run_sglang(rekindle, first, {"model": "llama", "version": 1}, adapter=str(adapter),
                       updates=[{"how": "disk", "path": later},
                                {"how": "tensor", "version": ["llama", 1], "path": first}])
    assert "error" not in said, (said["error"], said["log"])
    assert said["differ"] == [] and said["adapter"]["differ"] == []
    assert len(said["adapter"]["names"]) == 4  # of each layer A and B, stacked
    for update, version in zip(said["updates"], (2, 1)):
        assert update["answer"][0] and update["version"] == version, update
        assert update["differ"] == [] and update["names"] == said["names"]


def test_the_own_loader_takes_over_only_when_asked_to(rekindle, checkpoints):
    path = checkpoints["llama", 1]
    options = {"model": "nobody-has-it", "attach_timeout": 0.5}
    said = run_sglang(rekindle, path, options, world=2)
    assert {one["error"][0] for one in said} <= {"NotFoundError", "TimeoutError"}, said
    said = run_sglang(rekindle, path, {**options, "fallback": "default"}, world=2)
    assert [one.get("differ") for one in said] == [[], []], said


def test_its_checkpoint_engine_worker_takes_a_version(rekindle, checkpoints):
    """What `--checkpoint-engine-wait-weights-before-ready` waits for: SGLang's worker and
    checkpoint-engine's receiver, fed by our sender."""
    pytest.importorskip("checkpoint_engine")
    from rekindle.compat import checkpoint_engine as ce
    sent = []

    def send(address):
        with rk.attach("qwen3-moe", 2, device="double:0", agent=rekindle.store("a")) as session:
            sent.append(ce.send(session, address, "double:0", timeout=PATIENCE_S))

    with ce.channel.private_directory() as directory:
        sender = threading.Thread(target=send, args=(f"ipc://{directory}/0.sock",))
        sender.start()
        said, = run_sglang(
            rekindle, checkpoints["qwen3-moe", 1], {"model": "qwen3-moe", "version": 1},
            updates=[{"how": "ipc", "address": f"ipc://{directory}/0.sock",
                      "path": str(checkpoints["qwen3-moe", 2])}])
        sender.join(PATIENCE_S)
    update, = said["updates"]
    assert update["answer"][0] and update["differ"] == [], said
    assert sent and not sender.is_alive()
