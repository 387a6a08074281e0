"""rekindle.torch.load into a module that it has filled before: the rules of the first time."""
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rekindle as rk  # noqa: E402
import rekindle.torch  # noqa: E402
from transformers_models import build, config, outputs  # noqa: E402


def checkpoint(fleet, name, seed):
    """As transformers writes it: an expert a tensor."""
    from safetensors.torch import load_file
    path = fleet.directory / "updates" / f"{name}-{seed}"
    build(name, seed).save_pretrained(path)
    return load_file(path / "model.safetensors")


def fp8(tensors):
    made = dict(tensors)
    for name, tensor in tensors.items():
        if "_proj." in name:
            made[name] = tensor.to(torch.float8_e4m3fn)
            made[f"{name}_scale"] = torch.ones(1)
    return made


QUANTIZED = {"config.json": json.dumps({"quantization_config": {"quant_method": "fp8"}}).encode()}
PLAIN = {"config.json": b"{}"}


@pytest.fixture(scope="module", params=["llama", "llama_untied", "qwen3_moe"])
def name(request, fleet):
    """Version 1, and others that do not fit a model that has it; the last one does."""
    first, second = (checkpoint(fleet, request.param, seed) for seed in (5, 6))
    lacking = next(key for key in second if "down_proj" in key)
    wrong = {**second, "model.norm.weight": torch.ones(31)}
    every = [(first, PLAIN), (fp8(second), None), ({**second, "model.extra": torch.ones(2)}, None),
             ({key: value for key, value in second.items() if key != lacking}, None),
             (wrong, None), (second, QUANTIZED), (second, PLAIN)]
    for version, (tensors, files) in enumerate(every, 1):
        rk.publish(tensors, f"{request.param}@{version}", files=files, agent=fleet.store("a"))
    return request.param


@pytest.mark.parametrize("version, why", [
    (2, "float8_e4m3fn"), (3, r"model\.extra"), (4, "has nothing for|down_proj"),
    (5, r"model\.norm\.weight"), (6, "quantization in its configuration")])
def test_e1_e2_an_update_that_does_not_fit_is_refused_and_nothing_is_written(
        fleet, name, version, why):
    store = fleet.store("a")
    model = transformers.AutoModelForCausalLM.from_config(config(name)).eval()
    rekindle.torch.load(model, name, 1, agent=store).close()
    with pytest.raises(rk.Error, match=why) as said:
        rekindle.torch.load(model, name, version, agent=store)
    assert f"{name}@{version}" in str(said.value)
    assert torch.equal(outputs(model), outputs(build(name, 5)))
    rekindle.torch.load(model, name, 7, agent=store).close()
    assert torch.equal(outputs(model), outputs(build(name, 6)))


def test_e1_from_pretrained_does_not_lose_scales(fleet, name):
    with pytest.raises(rk.InvalidError, match=f"{name}@2 .*float8_e4m3fn.* scale of quantized"):
        rekindle.torch.from_pretrained(name, 2, config=config(name), agent=fleet.store("a"),
                                       model_class=transformers.AutoModelForCausalLM,
                                       torch_dtype=torch.float32)


def test_e2_without_strict_a_tensor_may_be_left_over(fleet, name):
    store = fleet.store("a")
    model = transformers.AutoModelForCausalLM.from_config(config(name)).eval()
    rekindle.torch.load(model, name, 1, agent=store).close()
    rekindle.torch.load(model, name, 3, agent=store, strict=False).close()
    assert torch.equal(outputs(model), outputs(build(name, 6)))
