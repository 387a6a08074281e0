"""A real vLLM, on the CPU, whose model outlives it: its successor has the same model, and loads
nothing."""
import pytest

from .models import deepseek_v3, llama, published, qwen3_moe
from .run_vllm import run_vllm

MODELS = {"llama": llama, "llama-tied": lambda: llama(True), "qwen3-moe": qwen3_moe,
          "deepseek-v3": deepseek_v3}
OPTIONS = {"version": 1, "resident": True, "device": "double:0"}


@pytest.fixture(scope="module")
def checkpoints(rekindle, memory_directory):
    return published(rekindle, memory_directory, MODELS)


def start(rekindle, path, model, instance, *, world=1, job=None, **options):
    found = run_vllm(rekindle, path, {**OPTIONS, "model": model, "instance": instance, **options},
                     world=world, resident=job or {})
    for one in found:
        assert "error" not in one, one
    return [one["resident"] for one in found]


def alike(first, second):
    assert second["tensors"] == first["tensors"]
    assert second["plain"] == first["plain"]
    assert second["names"] == first["names"] and not second["training"]


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_successor_has_the_model_of_a_worker_that_has_crashed(rekindle, checkpoints, name):
    first, = start(rekindle, checkpoints[name, 1], name, f"{name}-r")
    assert first["kept"] and first["rung"] == "local" and not first["warned"], first["warned"]
    second, = start(rekindle, checkpoints[name, 1], name, f"{name}-r")
    assert second["kept"] and second["rung"] == "resident" and not second["warned"]
    alike(first, second)
