"""What vLLM does besides a first load of one worker: its weight transfer, ranks of which one fails,
replicas that share experts, draft models. Its own code, on the CPU: vllm_worker.py."""
import json

import pytest
import torch

from .models import llama, qwen3_moe, saved, without
from .run_vllm import run_vllm

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def versions(rekindle, memory_directory):
    """Directory of each published model and version: `policy` has 1 to 3, 4 and 5 lack a tensor."""
    paths = {}
    for version in (1, 2, 3):
        paths["policy", version] = saved(llama, memory_directory / f"policy-{version}", version)
    paths["policy", 4] = without(paths["policy", 3], K_PROJ, memory_directory / "policy-4")
    paths["policy", 5] = without(paths["policy", 3], NORM, memory_directory / "policy-5")
    for version in (1, 2):
        paths["experts", version] = saved(
            qwen3_moe, memory_directory / f"experts-{version}", version)
    paths["small", 1] = saved(lambda: llama(layers=1), memory_directory / "small", 7)
    paths["eagle", 1] = eagle(memory_directory)
    for (name, version), path in paths.items():
        rekindle.publish(f"{name}@{version}", path)
    return paths


def eagle(directory):
    """A head of one layer, as published ones are: names without `model.`, and `fc`; embeddings are
    the target's."""
    from safetensors.torch import load_file, save_file
    path = saved(lambda: llama(layers=1), directory / "eagle", 8)
    tensors = {name.removeprefix("model."): tensor
               for name, tensor in load_file(path / "model.safetensors").items()
               if name not in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight")
               and "layers.0.input_layernorm" not in name}
    tensors["fc.weight"] = torch.randn(64, 128).to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["EagleLlamaForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def update(paths, *infos, then=None, **more):
    """Of `policy`; what it has then are the weights of a version, of the last one if not `then`."""
    path = paths["policy", then or infos[-1]["version"]]
    return {"infos": list(infos), "path": str(path), **more}


@pytest.mark.parametrize("record", [True, False], ids=["slices", "whole"])
def test_vllms_own_worker_updates_by_weight_transfer_again_and_again(rekindle, versions, record):
    """Also after one that was refused."""
    said, = run_vllm(
        rekindle, versions["policy", 1], {"model": "policy", "version": 1, "record": record},
        transfer={"init": {}, "updates": [
            update(versions, {"version": 2}), update(versions, {"version": 4}, then=2),
            update(versions, {"version": 5}, then=2), update(versions, {"version": 3})]})
    assert "error" not in said, said
    first, torn, bare, last = said["transfer"]
    assert "error" not in first and first["differ"] == [] and not first["active"], first
    assert first["status"]["version"] == 2 and first["status"]["torn"] is None
    for one in (torn, bare):  # refused before anything was touched
        assert one["error"][0] == "InvalidError" and one["differ"] == [], one
        assert one["status"]["version"] == 2 and one["status"]["torn"] is None
    assert ("model.layers.1.self_attn.qkv_proj.weight (5120 of 6144 elements written)"
            in torn["error"][1])
    assert "model.layers.0.input_layernorm" in bare["error"][1]
    assert "error" not in last and last["differ"] == [], last
    assert last["status"]["version"] == 3 and last["status"]["torn"] is None


def test_what_is_handed_over_to_load_with_is_looked_after_too(rekindle, versions):
    """As vLLM 0.23 has it: that the model's own comes, is called, and has enough to load."""
    said, = run_vllm(
        rekindle, versions["policy", 1], {"model": "policy", "version": 1, "record": False},
        transfer={"init": {}, "updates": [
            update(versions, {"version": 2}, handed="kernel", then=1),
            update(versions, {"version": 4}, handed="checkpoint", then=1),
            update(versions, {"version": 3}, handed="checkpoint")]})
    kernel, short, last = said["transfer"]
    assert kernel["error"][0] == "InvalidError" and "checkpoint" in kernel["error"][1]
    assert kernel["differ"] == [] and kernel["status"]["torn"] is None
    assert "qkv_proj.weight (5120 of 6144 elements written)" in short["error"][1]
    assert short["differ"] == [] and short["status"]["torn"] is None
    assert "error" not in last and last["differ"] == [] and last["status"]["version"] == 3, last


def test_a_weight_update_is_one_version(rekindle, versions):
    said, = run_vllm(
        rekindle, versions["policy", 1], {"model": "policy", "version": 1, "record": False},
        transfer={"init": {"options": {"model": "policy", "agent": str(rekindle.store("a"))}},
                  "updates": [update(versions, {"version": 2}, {"version": 3}),
                              {"infos": [], "path": str(versions["policy", 1])},
                              update(versions, {"version": 3})]})
    twice, none, last = said["transfer"]
    assert twice["error"][0] == "InvalidError" and "finish it" in twice["error"][1], twice
    assert "error" not in none and "finish it" in none["status"]["torn"] and not none["active"]
    assert "error" not in last and last["differ"] == [], last


def test_vllms_reload_without_arguments_is_given_and_holds_the_version_of_the_options(
        rekindle, versions):
    said, = run_vllm(rekindle, versions["policy", 1],
                     {"model": "policy", "version": 1, "instance": "reloaded"},
                     reload={"version": 2, "path": str(versions["policy", 2])})
    assert "error" not in said and said["reload"]["differ"] == [], said
    status = said["reload"]["status"]["target"]
    assert status["version"] == 2 and status["generation"] > said["generation"]


@pytest.mark.parametrize("broken", ["attached", "execute"])
def test_when_one_rank_fails_all_take_vllms_own_loader(rekindle, versions, broken):
    path, options = versions["policy", 2], {"model": "policy", "version": 1, "instance": broken}
    said = run_vllm(rekindle, path, {**options, "fallback": "default"}, world=2,
                    ranks={1: {"break": broken}})
    assert [one.get("differ") for one in said] == [[], []], said  # the files are of another version
    assert ["version" in one for one in said] == [False, False]


def test_when_one_rank_fails_and_nothing_was_asked_for_all_fail_at_once(rekindle, versions):
    """Well before the 600 s that a rank would wait for the others to commit."""
    said = run_vllm(rekindle, versions["policy", 1],
                    {"model": "policy", "version": 1, "instance": "strict"}, world=2,
                    ranks={0: {"break": "execute"}})
    assert [one["error"][0] for one in said] == ["PeerLostError", "PeerLostError"], said
    assert said[1]["error"][1] == "rank 0 of 2: the agent is gone"


def test_replicas_that_share_experts_load_the_version_that_the_first_one_finds(rekindle, versions):
    said = run_vllm(rekindle, versions["experts", 2], {"model": "experts", "instance": "shared"},
                    world=2, replicas=True, experts=True)
    assert [one.get("differ") for one in said] == [[], []], said
    assert [one["asked"] for one in said] == [["latest", 2], [2]]
    assert [one["instance"] for one in said] == ["shared", "shared.dp1"]
    experts = [{n.split(".")[5] for n in one["names"] if ".experts." in n} for one in said]
    assert experts == [set("0123"), set("4567")]


@pytest.mark.parametrize("method, name, kind", [
    ("draft_model", "small", "LlamaForCausalLM"), ("eagle", "eagle", "EagleLlamaForCausalLM")])
def test_a_draft_is_what_vllms_own_loader_makes_of_it(rekindle, versions, method, name, kind):
    said, = run_vllm(
        rekindle, versions["policy", 1], {"model": "policy", "version": 1, "draft_model": name},
        speculative={"method": method, "model": str(versions[name, 1]),
                     "num_speculative_tokens": 2})
    assert "error" not in said, said
    assert said["draft"]["differ"] == [[], []] and said["draft"]["kind"] == kind
    assert said["draft"]["parameters"] > 5
    status = said["draft"]["status"]
    assert (status["target"]["model"], status["draft"]["model"]) == ("policy", name)
    assert status["draft"]["recorded"]
