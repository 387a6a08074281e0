"""Updates of the real vLLM, on the CPU, to versions that do not fit the model: each is refused, by
the rules of a first load, and the model keeps its weights to the last bit."""
import pytest
import torch

from .models import deepseek_v3, llama, qwen3_moe, saved
from .run_vllm import run_vllm

MODELS = {"llama": llama, "llama-tied": lambda: llama(True), "qwen3-moe": qwen3_moe,
          "deepseek-v3": deepseek_v3}
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def paths(rekindle, memory_directory):
    """(name, version) → directory; version 3 has the weights of 2 in F32."""
    from safetensors.torch import load_file, save_file
    made = {}
    for name, make in MODELS.items():
        for version in (1, 2):
            made[name, version] = saved(make, memory_directory / f"{name}-{version}", version)
        tensors = load_file(made[name, 2] / "model.safetensors")
        made[name, 3] = memory_directory / f"{name}-3"
        made[name, 3].mkdir()
        save_file({key: tensor.float() for key, tensor in tensors.items()},
                  made[name, 3] / "model.safetensors")
        for version in (1, 2, 3):
            rekindle.publish(f"{name}@{version}", made[name, version])
    return made


def fp8(tensors, scales=True):
    """As an FP8 checkpoint has them."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        if "_proj." in name:
            made[name] = tensor.to(torch.float8_e4m3fn)
            if scales:
                made[f"{name}_scale"] = torch.ones(1)
    return made


WRONG = {  # what is published, what the refusal says of it
    4: (lambda tensors: fp8(tensors), "float8_e4m3fn"),
    5: (lambda tensors: fp8(tensors, scales=False), "float8_e4m3fn"),
    6: (lambda tensors: {**tensors, "model.layers.0.extra.weight": torch.ones(4)},
        "model.layers.0.extra.weight is float32 [4] in it, absent in llama@1"),
    7: (lambda tensors: {name: value for name, value in tensors.items() if name != DOWN},
        "model.layers.1.mlp.down_proj.weight (nothing written)"),
    8: (lambda tensors: {**tensors, DOWN: torch.ones(64, 100).bfloat16()},
        f"{DOWN} is bfloat16 [64, 100] in it, bfloat16 [64, 128] in llama@1"),
}


@pytest.fixture(scope="module")
def wrong(rekindle, paths, memory_directory):
    from safetensors.torch import load_file, save_file
    tensors = load_file(paths["llama", 2] / "model.safetensors")
    for version, (change, _) in WRONG.items():
        path = memory_directory / f"wrong-{version}"
        path.mkdir()
        save_file(change(tensors), path / "model.safetensors")
        rekindle.publish(f"llama@{version}", path)
        paths["wrong", version] = path
    return paths


def check_refusals(said, key="updates"):
    assert "error" not in said and said["differ"] == [], said
    *refused, last = said[key]
    for (version, (_, why)), one in zip(WRONG.items(), refused, strict=True):
        kind, text = one["error"]
        assert kind == "InvalidError", one
        assert f"llama@{version} does not fit the model" in text and why in text, text
        assert "nothing was written, the model keeps llama@1" in text
        assert one["differ"] == [], version  # from the first version's weights
        assert one["status"]["version"] == 1 and one["status"]["torn"] is None
    assert "error" not in last and last["differ"] == [] and last["status"]["version"] == 2, last


@pytest.mark.parametrize("record, runner", [(True, "v1"), (False, "v1"), (True, "v2")],
                         ids=["slices", "whole", "model-runner-v2"])
def test_e1_e2_an_update_that_does_not_fit_is_refused_and_the_model_keeps_its_weights(
        rekindle, wrong, record, runner):
    first = str(wrong["llama", 1])
    check_refusals(*run_vllm(
        rekindle, first, {"model": "llama", "version": 1, "record": record}, runner=runner,
        updates=[*({"version": version, "path": first} for version in WRONG),
                 {"version": 2, "path": str(wrong["llama", 2])}]))


def test_e1_e2_weight_transfer_refuses_the_same(rekindle, wrong):
    first = str(wrong["llama", 1])
    check_refusals(*run_vllm(
        rekindle, first, {"model": "llama", "version": 1},
        transfer={"init": {}, "updates": [
            *({"infos": [{"version": version}], "path": first} for version in WRONG),
            {"infos": [{"version": 2}], "path": str(wrong["llama", 2])}]}), key="transfer")


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_version_of_another_dtype_is_recorded_anew_and_is_what_vllms_own_loader_gives(
        rekindle, paths, name):
    """The model serves meanwhile: the recording finds its parameters as a loader does."""
    said, = run_vllm(rekindle, paths[name, 1], {"model": name, "version": 1}, updates=[
        {"version": version, "path": str(paths[name, version])} for version in (2, 3, 1)])
    assert said.get("differ") == [], said
    for one, version in zip(said["updates"], (2, 3, 1), strict=True):
        assert "error" not in one and one["differ"] == [], one
        assert one["status"]["version"] == version and one["status"]["torn"] is None


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_that_is_made_anew_for_a_model_that_serves_is_that_of_its_first_load(
        rekindle, paths, name):
    """Also of experts, whose post-processing vLLM cannot run without kernels."""
    said, = run_vllm(rekindle, paths[name, 1], {"model": name, "version": 1}, plan={"version": 3})
    if said.get("error") == ["NotImplementedError", "MLA is not supported on CPU."]:
        pytest.skip(f"this vLLM makes no {name} on a CPU: {said['error'][1]}")
    assert said.get("plan") == {"same_boxes": True, "same_parameters": True, "differ": []}, said


@pytest.mark.parametrize("version", WRONG)
@pytest.mark.parametrize("record", [True, False], ids=["slices", "whole"])
def test_e2_e3_a_first_load_refuses_what_an_update_refuses(rekindle, wrong, version, record):
    said, = run_vllm(rekindle, wrong["llama", 1],
                     {"model": "llama", "version": version, "record": record})
    kind, text = said["error"]
    assert kind == "InvalidError" and f"llama@{version}" in text, text
    if version == 8:
        assert f"{DOWN}, bfloat16 [64, 100]" in text
        assert f"{DOWN}, bfloat16 [64, 128]" in text
