"""Load format rekindle under the real vLLM, on the CPU: every parameter bit-identical to what
vLLM's own loader makes of the same checkpoint."""
import pytest

from .models import deepseek_v3, llama, published, qwen3_moe, without
from .run_vllm import run_vllm

MODELS = {"llama": llama, "llama-tied": lambda: llama(True), "qwen3-moe": qwen3_moe,
          "deepseek-v3": deepseek_v3}


@pytest.fixture(scope="module")
def checkpoints(rekindle, memory_directory):
    return published(rekindle, memory_directory, MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_has_what_vllms_own_loader_gives(rekindle, checkpoints, name):
    said, = run_vllm(rekindle, checkpoints[name, 1], {"model": name, "version": 1})
    if name == "deepseek-v3" and said.get("error") == [
            "NotImplementedError", "MLA is not supported on CPU."]:  # before 0.33
        pytest.skip(f"this vLLM makes no {name} on a CPU: {said['error'][1]}")
    assert said.get("differ") == [], said
    assert said["recorded"]


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_of_two_ranks_each_fetches_its_half_and_they_commit_together(rekindle, checkpoints, name):
    """Twice: the second time from cached plans."""
    options = {"model": name, "version": 1, "instance": f"{name}-tp2"}
    for _ in range(2):
        said = run_vllm(rekindle, checkpoints[name, 1], options, world=2)
        assert [one.get("differ") for one in said] == [[], []], said
        assert said[0]["generation"] == said[1]["generation"] > 0
        whole, = run_vllm(rekindle, checkpoints[name, 1],
                          {"model": name, "version": 1, "record": False})
        assert whole["differ"] == [] and not whole["recorded"]
        assert max(one["bytes"] for one in said) < 0.7 * whole["bytes"]


def test_with_expert_parallelism_a_rank_fetches_its_experts_only(rekindle, checkpoints):
    said = run_vllm(rekindle, checkpoints["qwen3-moe", 1], {"model": "qwen3-moe", "version": 1},
                    world=2, experts=True)
    assert [one.get("differ") for one in said] == [[], []], said
    experts = [{n.split(".")[5] for n in one["names"] if ".experts." in n} for one in said]
    assert experts == [set("0123"), set("4567")]


def test_ranks_without_a_version_load_the_same_one_or_fail_alike(rekindle, checkpoints):
    said = run_vllm(rekindle, checkpoints["llama", 2], {"model": "llama"}, world=2)
    assert [one.get("differ") for one in said] == [[], []], said
    assert [one["version"] for one in said] == [2, 2]
    said = run_vllm(rekindle, checkpoints["llama", 2],
                    {"model": "nobody-has-it", "attach_timeout": 0.5}, world=2)
    assert said[0]["error"] == said[1]["error"] and "nobody-has-it" in said[0]["error"][1]


def test_through_buckets_of_a_device(rekindle, checkpoints):
    said, = run_vllm(rekindle, checkpoints["llama", 1],
                     {"model": "llama", "version": 1, "device": "double:0"})
    assert said.get("differ") == [], said


@pytest.mark.parametrize("options", [{}, {"record": False}, {"device": "double:1"}],
                         ids=["slices", "whole", "device"])
def test_a_running_model_is_updated_layer_by_layer(rekindle, checkpoints, options):
    instance = f"updated-{min(options, default='slices')}"
    said, = run_vllm(
        rekindle, checkpoints["llama", 1],
        {"model": "llama", "version": 1, "instance": instance, **options},
        update={"version": 2, "path": str(checkpoints["llama", 2])})
    assert "error" not in said, said
    assert said["version"] == 1 and said["differ"] == []
    assert said["update"]["version"] == 2 and said["update"]["differ"] == []
    status = said["update"]["status"]["target"]
    assert status["version"] == 2 and status["generation"] > said["generation"]


def test_a_parameter_that_no_tensor_is_for_is_an_error_that_names_it(
        rekindle, checkpoints, memory_directory):
    """vLLM says that a fused parameter is loaded when one of its three parts is."""
    path = checkpoints["llama", 1]
    torn = without(path, "model.layers.1.self_attn.k_proj.weight", memory_directory / "torn")
    rekindle.publish("torn@1", torn)
    said, = run_vllm(rekindle, path, {"model": "torn"})
    kind, text = said["error"]
    assert kind == "InvalidError"
    assert "model.layers.1.self_attn.qkv_proj.weight (5120 of 6144 elements written)" in text


def test_the_default_loader_takes_over_only_when_asked_to(rekindle, checkpoints):
    path = checkpoints["llama", 1]
    options = {"model": "nobody-has-it", "attach_timeout": 0.5}
    said, = run_vllm(rekindle, path, options)
    assert said["error"][0] in ("NotFoundError", "TimeoutError"), said
    said, = run_vllm(rekindle, path, {**options, "fallback": "default"})
    assert said.get("differ") == [], said
    said, = run_vllm(rekindle, path, {"modle": "llama", "fallback": "default"})
    assert said["error"][0] == "InvalidError" and "'modle'" in said["error"][1]
