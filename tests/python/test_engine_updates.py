"""An update obeys the rules of a first load: what does not fit is refused before anything of a model
that serves is written. Engines are stand-ins here; the real ones: engines/."""
import contextlib
import importlib
import json
import sys
import types

import pytest
import torch
from torch import nn

import rekindle as rk
from rekindle._engines.loading import ALONE, again, fill, held
from rekindle._engines.options import Options
from rekindle._engines.ranks import ONE
from rekindle._engines.reading import whole_tensors
from rekindle.vllm import WorkerExtension
from sglang_stand_in import DefaultModelLoader, load, sglang  # noqa: F401

BASE = {"layers.0.q": torch.randn(8, 4), "layers.0.k": torch.randn(8, 4),
        "layers.1.q": torch.randn(8, 4), "layers.1.k": torch.randn(8, 4),
        "norm": torch.randn(4)}


class Strict(nn.Module):
    """As vLLM's models: q and k in one parameter, and a tensor that it does not know is an error."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.qk = nn.Parameter(torch.full((16, 4), float("nan")), requires_grad=False)
        self.norm = nn.Parameter(torch.full((4,), float("nan")), requires_grad=False)

    def load_weights(self, weights):
        loaded = set()
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
                loaded.add(name)
            else:
                _, layer, part = name.split(".")
                param = self.layers[int(layer)].qk
                if part not in ("q", "k"):
                    raise ValueError(f"there is no parameter for {name}")
                to = param.data.narrow(0, 0 if part == "q" else 8, 8)
                to.copy_(weight.narrow(0, 0, 8))
                loaded.add(f"layers.{layer}.qk")
        return loaded


class Lenient(Strict):
    """As SGLang's: what it does not know it passes over. It clears what it fills."""

    def load_weights(self, weights):
        self.norm.data.zero_()
        super().load_weights((name, weight) for name, weight in weights if name in BASE)


class Computing(Strict):
    """No recording can follow it."""

    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        self.total = float(self.norm.sum())
        return loaded


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rekindle._engines.loading._held", {})
    monkeypatch.setattr("rekindle._engines.staging._next", {})


def without(*names):
    return {name: tensor for name, tensor in BASE.items() if name not in names}


def quantized():
    """The same model in FP8: a scale for each weight."""
    made = {"norm": BASE["norm"]}
    for name in without("norm"):
        made[name] = BASE[name].to(torch.float8_e4m3fn)
        made[f"{name}_scale"] = torch.ones(1)
    return made


def config(**quantization):
    return {"config.json": json.dumps({"model_type": "m", **(
        {"quantization_config": quantization} if quantization else {})}).encode()}


@pytest.fixture(scope="module")
def versions(rekindle):
    """Of model `m`: by what is different in them, their numbers."""
    numbers = {}

    def publish(what, tensors, files=None):
        numbers[what] = len(numbers) + 1
        rk.publish(tensors, f"m@{numbers[what]}", files=files, agent=rekindle.store("a"))

    publish("base", BASE, config())
    publish("fp8", quantized())
    publish("raw fp8", {**BASE, "layers.1.q": BASE["layers.1.q"].to(torch.float8_e4m3fn)})
    publish("one more", {**BASE, "layers.0.extra": torch.ones(3)})
    publish("one less", without("layers.1.k"))
    publish("shape", {**BASE, "layers.1.k": torch.randn(6, 4)})
    publish("configuration", BASE, config(quant_method="fp8"))
    publish("half", {name: tensor.half() for name, tensor in BASE.items()})
    publish("same", {name: tensor + 1 for name, tensor in BASE.items()}, config())
    return numbers


@pytest.fixture
def options(rekindle, versions):
    return lambda what, **more: Options.parse({
        "model": "m", "version": versions[what], "agent": str(rekindle.store("a")), **more})


def served(options, kind=Strict, **more):
    """A model that has been filled from the first version, and its values."""
    model = kind()
    fill(model, model.load_weights, options("base", **more), ALONE, None)
    return model, {name: value.clone() for name, value in model.named_parameters()}


def by_again(model, options, what, **more):
    """As vLLM's updates and its weight transfer attach."""
    found = again(model, model.load_weights, options(what, **more), ALONE, held("target"))
    try:
        with torch.no_grad():
            model.load_weights(whole_tensors(found.session, 10.0))
    finally:
        found.session.close()
    return found


REFUSED = [
    ("fp8", r"layers\.0\.k.* is float8_e4m3fn in it, and the model has it as float32"),
    ("raw fp8", r"layers\.1\.q is float8_e4m3fn in it, and the model has it as float32"),
    ("one more", r"layers\.0\.extra is float32 \[3\] in it, absent in m@1"),
    ("one less", r"layers\.1\.qk \(32 of 64 elements written\), as it has no layers\.1\.k"),
    ("shape", r"layers\.1\.k is float32 \[6, 4\] in it, float32 \[8, 4\] in m@1, and .* failed"),
    ("configuration", "the quantization in its configuration"),
]


@pytest.mark.parametrize("record", [True, False], ids=["slices", "whole"])
@pytest.mark.parametrize("what, why", REFUSED, ids=[what for what, _ in REFUSED])
@pytest.mark.parametrize("kind", [Strict, Lenient])
def test_e1_e2_an_update_that_does_not_fit_is_refused_and_nothing_is_written(
        options, versions, kind, what, why, record):
    if (kind, what) == (Strict, "fp8"):  # its loader raises at the scales
        why = r"layers\.0\.k is float8_e4m3fn|layers\.0\.k_scale is float32 \[1\] in it, absent"
    model, values = served(options, kind, record=record)
    if what == "one more" and kind is Lenient:
        why = r"does not read layers\.0\.extra, float32 \[3\], which m@1 did not have"
    with pytest.raises(rk.InvalidError, match=why) as said:
        by_again(model, options, what, record=record)
    assert f"m@{versions[what]} does not fit the model" in str(said.value)
    assert "nothing was written, the model keeps m@1" in str(said.value)
    assert "\n" not in str(said.value)
    for name, value in model.named_parameters():
        assert torch.equal(value, values[name]), name
    now = held("target")
    assert now.session.version == 1 and now.torn is None and not now.session.closed


def test_e1_a_loader_that_cannot_be_followed_is_given_the_same_tensors_only(options, versions):
    model, _ = served(options, Computing)
    found = by_again(model, options, "same")
    assert found.boxes is None and torch.equal(model.norm, BASE["norm"] + 1)
    model, values = served(options, Computing)
    with pytest.raises(rk.InvalidError, match=r"layers\.0\.extra is float32 \[3\] in it and absent"):
        by_again(model, options, "one more")
    assert torch.equal(model.norm, values["norm"])


@pytest.mark.parametrize("what", ["same", "half"])
def test_e1_a_version_of_other_plain_dtypes_is_recorded_anew(options, versions, what):
    model, _ = served(options)
    boxes = held("target").boxes
    found = by_again(model, options, what)
    assert found.boxes is not None and (found.boxes is boxes) == (what == "same")
    factor = 1 if what == "same" else 0
    want = (BASE["layers.1.q"] + factor).to(torch.half if what == "half" else torch.float32)
    assert torch.equal(model.layers[1].qk[:8], want.float())


def test_e2_what_an_update_takes_a_first_load_takes_and_the_other_way_round(options, versions):
    """One rule: a worker that starts again must not refuse what the others have moved to."""
    for what in versions:
        taken = []
        first, later = Strict(), served(options)[0]
        for step in (lambda: fill(first, first.load_weights, options(what), ALONE, None, "other"),
                     lambda: by_again(later, options, what)):
            try:
                step()
                taken.append(True)
            except rk.InvalidError:
                taken.append(False)
        if what == "configuration":  # a first load has no other version to compare with
            taken[0] = False
        assert taken[0] == taken[1], what


def test_e2_a_tensor_that_nobody_reads_may_be_named(options, versions):
    model, _ = served(options, Lenient)
    assert by_again(model, options, "one more", allow_unread=["^layers.0.extra$"]).boxes


@pytest.mark.parametrize("record", [True, False], ids=["slices", "whole"])
def test_e1_a_first_load_does_not_convert_between_quantized_and_plain_dtypes(options, record):
    model = Lenient()
    with pytest.raises(rk.InvalidError, match=r"layers\.1\.q.*float8_e4m3fn.* scale of quantized"
                       ) as said:
        fill(model, model.load_weights, options("raw fp8", record=record), ALONE, None)
    assert "m@3" in str(said.value) and "layers.1.qk" in str(said.value)


@pytest.mark.parametrize("record", [True, False], ids=["slices", "whole"])
def test_e3_a_wrong_shape_names_tensor_version_and_both_shapes(options, versions, record):
    model = Strict()
    with pytest.raises(rk.InvalidError) as said:
        fill(model, model.load_weights, options("shape", record=record), ALONE, None)
    text = str(said.value)
    assert f"m@{versions['shape']}" in text and "layers.1.k, float32 [6, 4]" in text
    assert "layers.1.qk, float32 [16, 4]" in text and "exceeds dimension size (6)" in text


@pytest.mark.parametrize("group", [None, "actors"])
def test_e4_a_newer_version_that_is_there_is_returned_by_the_first_call(rekindle, group):
    name, store = f"waited-{group}", rekindle.store("a")
    rk.publish(BASE, f"{name}@1", agent=store)
    model = Strict()
    fill(model, model.load_weights,
         Options.parse({"model": name, "agent": str(store), "group": group}), ALONE, None)
    worker = WorkerExtension()
    assert worker.rekindle_wait_for_update(0) is None
    rk.publish(BASE, f"{name}@2", agent=store)
    fill(model, model.load_weights, Options.parse(
        {"model": name, "agent": str(store), "group": group, "version": 1}), ALONE, None)
    # A group moves when an update has begun, not when a version has been published.
    assert worker.rekindle_wait_for_update(0) == (None if group else 2)


# --- vLLM


@pytest.fixture
def vllm_worker(options, monkeypatch):
    """A worker of vLLM that serves the first version, with a stand-in for vLLM and its reload."""
    for name, contents in {"config": {"set_current_vllm_config": contextlib.nullcontext},
                           "distributed.parallel_state": {}}.items():
        module = types.ModuleType(f"vllm.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    updating = importlib.import_module("rekindle.vllm.updating")
    monkeypatch.setattr(updating.versions, "check", lambda: "0.33.0")
    monkeypatch.setattr(updating, "ranks_of", lambda role: ONE)
    monkeypatch.setattr(updating, "place_of", lambda *_: ALONE)
    monkeypatch.setattr(updating, "load_layout", lambda model: contextlib.nullcontext())
    monkeypatch.setattr(updating, "abandon", lambda model: None)

    def reload(model, given, session, apply, contents):
        apply(whole_tensors(session, 10.0))
        session.loaded()

    monkeypatch.setattr(updating, "reload", reload)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, _ = served(options, device="double:0", staging_reserve_bytes=0)

    class Worker(WorkerExtension):
        vllm_config = types.SimpleNamespace(parallel_config=None, load_config=None)
        model_runner = types.SimpleNamespace(get_model=lambda: model)

        def reload_weights(self, weights_iterator):
            with torch.no_grad():
                model.load_weights(weights_iterator)

    return Worker(), model


def test_a_staged_version_leaves_vllms_model_alone_until_the_switch(vllm_worker, versions):
    worker, model = vllm_worker
    with pytest.raises(rk.NotFoundError, match="rekindle_stage"):
        worker.rekindle_switch()
    worker.rekindle_stage(versions["same"])
    said = worker.rekindle_staged(30.0)
    assert said["staged"] and said["why_not"] is None and said["version"] == versions["same"]
    assert torch.equal(model.norm, BASE["norm"]) and held("target").session.version == 1
    done = worker.rekindle_switch()
    assert done["version"] == versions["same"] and torch.equal(model.norm, BASE["norm"] + 1)
    assert {"declare", "copy", "apply", "resume"} == done["phases"].keys()
    worker.rekindle_stage(versions["base"])
    worker.rekindle_unstage()
    with pytest.raises(rk.NotFoundError):
        worker.rekindle_staged()
    worker.rekindle_stage(versions["base"])
    worker.rekindle_update(versions["base"])  # takes what is staged
    assert torch.equal(model.norm, BASE["norm"])


def test_vllm_says_why_a_version_is_not_staged_and_loads_it_in_the_pause(vllm_worker, versions,
                                                                         options):
    worker, model = vllm_worker
    large = {"model": "m", "agent": options("base").agent, "device": "double:0",
             "staging_reserve_bytes": 8 << 30}
    said = worker.rekindle_stage(versions["same"], large)
    assert not said["staged"] and "no room to stage m@" in said["why_not"]
    assert torch.equal(model.norm, BASE["norm"])
    assert "no room" in worker.rekindle_switch()["why_not"]
    assert torch.equal(model.norm, BASE["norm"] + 1)
    with pytest.raises(rk.ExhaustedError, match="no room to stage"):
        worker.rekindle_stage(versions["base"], {**large, "staging": "require"})
    with pytest.raises(rk.InvalidError, match="staging is one of auto, require, off"):
        worker.rekindle_stage(versions["base"], {**large, "staging": "gpu"})


def test_a_switch_that_fails_before_the_first_write_leaves_the_model_whole(vllm_worker, versions,
                                                                           monkeypatch):
    worker, model = vllm_worker
    worker.rekindle_stage(versions["same"])
    monkeypatch.setattr(rk.Session, "begin_switch", _refuse)
    with pytest.raises(rk.InvalidError, match="another version"):
        worker.rekindle_switch()
    assert torch.equal(model.norm, BASE["norm"])
    now = held("target")
    assert now.torn is None and now.session.version == 1 and not now.session.closed


def test_a_switch_that_fails_in_a_write_leaves_the_model_torn(vllm_worker, versions, monkeypatch):
    worker, model = vllm_worker
    worker.rekindle_stage(versions["same"])
    monkeypatch.setattr(Strict, "load_weights", _refuse)
    with pytest.raises(rk.InvalidError, match="another version"):
        worker.rekindle_switch()
    assert "another version" in held("target").torn


def _refuse(*_, **__):
    raise rk.InvalidError("another version")


# --- SGLang


@pytest.fixture
def from_base(rekindle, sglang, versions, monkeypatch):  # noqa: F811
    """A SGLang that serves the first version."""
    monkeypatch.setattr(DefaultModelLoader, "makes", Lenient)
    sglang.server.model_loader_extra_config = {"model": "m", "agent": str(rekindle.store("a"))}
    _, model = load(rekindle, model="m", version=1)
    return model


@pytest.mark.parametrize("what, why", REFUSED, ids=[what for what, _ in REFUSED])
def test_e1_e2_sglang_refuses_such_an_update_before_it_writes(
        rekindle, from_base, versions, what, why):
    from rekindle import sglang as ours
    values = {name: value.clone() for name, value in from_base.named_parameters()}
    if what == "one more":
        why = r"does not read layers\.0\.extra"
    if what == "fp8":
        why = "quantization|float8"
    with pytest.raises(rk.InvalidError, match=why) as said:
        ours.load(from_base, ours.version("m", versions[what]))
    assert "the model keeps m@1" in str(said.value) and "must not serve" not in str(said.value)
    for name, value in from_base.named_parameters():
        assert torch.equal(value, values[name]), name
    assert held("target").session.version == 1 and held("target").torn is None
    ours.load(from_base, ours.version("m", versions["same"]))
    assert torch.equal(from_base.norm, BASE["norm"] + 1)
