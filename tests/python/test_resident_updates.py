"""When a model that outlives its worker is noted and sealed: rules without agents and engines."""
import importlib
import json
import os
import sys
import types

import pytest
import torch
from torch import nn

import sglang_stand_in as stand_in
from rekindle._engines import loading, resident
from rekindle._engines.loading import Held


@pytest.fixture(autouse=True)
def sealed(monkeypatch):
    """The descriptions that the keeper gets."""
    found = []
    monkeypatch.setattr(resident, "_kept", {})
    monkeypatch.setattr(loading, "_held", {})
    monkeypatch.setattr("rekindle._resident.seal",
                        lambda session, key, description, *more: found.append(description))
    return found


def hold(torn=None):
    session = types.SimpleNamespace(model="m", version=1, _native=None, _device=None,
                                    _resident=False, close=lambda: None)
    wanted = types.SimpleNamespace(names=frozenset(), boxes=None,
                                   contents=types.SimpleNamespace(tensors={}))
    loading.hold("target", Held(wanted, session, torn))
    return loading.held("target")


def keep(model):
    """Has the model kept, with no tensor of it in a block."""
    about = {"format": resident.FORMAT, "changes": [], "rebuild": False, "tensors": [], "small": [],
             "none": [], "gone": []}
    resident._kept["target"] = resident.Kept(resident.weakref.ref(model), "key", [], about)
    return hold()


def test_weights_of_two_versions_are_not_sealed(sealed, caplog):
    model = nn.Module()
    keep(model).torn = "the link is down"
    resident.seal_again("target")
    assert not sealed and "m@1 is not resident" in caplog.text and "the link is down" in caplog.text
    # It is unknown what of the model that is.
    hold()
    resident.seal_again("target")
    assert not sealed


def updated(monkeypatch, model, value, error=None, begun=True):
    """An update by vLLM's worker that sets an attribute, and then fails with `error`."""
    from rekindle.vllm import updating

    def finish(following, role, ranks, update):
        update.begun = begun
        model.rows = value
        if error is not None:
            raise error
        return hold()
    monkeypatch.setattr(updating, "finish", finish)
    monkeypatch.setattr(updating, "ranks_of", lambda role: None)
    updating.complete(None, "target")
    resident.seal_again("target")


def test_changes_of_an_update_that_failed_are_sealed_with_the_next_one(sealed, monkeypatch):
    model = nn.Module()
    model.rows = 1
    keep(model)
    for begun in (True, False):
        with pytest.raises(ValueError):
            updated(monkeypatch, model, 2, ValueError("a link is down"), begun)
    updated(monkeypatch, model, 2)
    change, = json.loads(sealed[0])["changes"]
    assert resident.postprocessing.shown(change["at"]) == "rows" and change["value"] == {"int": 2}


def test_an_update_that_failed_before_its_first_write_notes_nothing(sealed, monkeypatch):
    """An engine may change what it likes while it serves."""
    model = nn.Module()
    model.rows = 1
    keep(model)
    with pytest.raises(ValueError):
        updated(monkeypatch, model, 1, ValueError("the version is not there"), begun=False)
    model.cache = lambda: None
    updated(monkeypatch, model, 1)
    assert len(sealed) == 1


def test_sglang_that_goes_back_seals_the_changes_of_both_updates(sealed, monkeypatch):
    stand_in.install(monkeypatch)
    from rekindle.sglang import filling, loader
    model = nn.Module()
    model.rows = 1
    now = keep(model)

    def failing(*_):
        model.rows, now.torn = 2, "a link is down"
        raise ValueError("a link is down")
    monkeypatch.setattr(filling, "part_of", lambda _: filling.TARGET)
    loads = loader.RekindleModelLoader(stand_in.LoadConfig("rekindle", {"model": "m"}))
    weights = loader._Weights(None, loads.options, back=True)
    monkeypatch.setattr(filling, "update", failing)
    with pytest.raises(ValueError):
        loads.load_weights_and_postprocess(model, weights, None)
    monkeypatch.setattr(filling, "update", lambda *_: hold())
    loads.load_weights_and_postprocess(model, weights, None)
    assert json.loads(sealed[0])["changes"][0]["value"] == {"int": 2}


# --- vLLM's weight transfer


@pytest.fixture
def transfer(monkeypatch):
    """A backend of weight transfer on a stand-in for vLLM."""
    class Engine:
        def __class_getitem__(cls, _):
            return cls

        def __init__(self, config, model):
            self.model = self._default_model = model
            self.model_config = self.parallel_config = None

    class Info:
        pass

    def nothing(*_):
        pass

    for name, members in {
            "distributed.weight_transfer.base": {
                "WeightTransferEngine": Engine, "WeightTransferInitInfo": Info,
                "WeightTransferUpdateInfo": Info},
            "distributed.weight_transfer.factory": {"WeightTransferEngineFactory": None},
            "model_executor.model_loader.reload": {
                "initialize_layerwise_reload": nothing,
                "finalize_layerwise_reload": nothing}}.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", types.SimpleNamespace(**members))
    monkeypatch.delitem(sys.modules, "rekindle.vllm.transfer", raising=False)
    from rekindle.vllm import transfer as backend
    monkeypatch.setattr(backend, "bring", nothing)
    monkeypatch.setattr(backend, "abandon", nothing)
    monkeypatch.setattr(backend, "replace", lambda options, **_: options)
    yield backend
    sys.modules.pop("rekindle.vllm.transfer", None)


def engine_of(transfer, model):
    engine = transfer.RekindleTransferEngine(None, model)
    engine._options = types.SimpleNamespace(model="m")
    return engine


def test_weight_transfer_seals_the_target_and_only_after_an_update(transfer, sealed):
    model = nn.Module()
    keep(model)
    engine = engine_of(transfer, model)
    engine.start_weight_update()
    engine.finish_weight_update()
    assert not sealed, "no version was loaded"
    engine.model = nn.Module()
    engine.start_weight_update()
    engine.receive_weights(transfer.RekindleUpdateInfo())
    engine.finish_weight_update()
    assert not sealed, "a draft was updated"
    engine.model = model
    engine.start_weight_update()
    engine.receive_weights(transfer.RekindleUpdateInfo())
    engine.finish_weight_update()
    assert len(sealed) == 1


def test_weight_transfer_that_vllm_ends_itself_keeps_nothing(transfer, sealed):
    model = nn.Module()
    keep(model)
    engine_of(transfer, model).receive_weights(transfer.RekindleUpdateInfo(), model.forward)
    resident.seal_again("target")
    assert not resident._kept and not sealed


# --- vLLM's reload_weights()


@pytest.fixture
def loader(monkeypatch):
    """rekindle.vllm.loader without vLLM."""
    for name, members in {
            "config": {"get_current_vllm_config": None},
            "model_executor.model_loader": {"register_model_loader": None},
            "model_executor.model_loader.base_loader": {"BaseModelLoader": object},
            "model_executor.model_loader.default_loader": {"DefaultModelLoader": object}}.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", types.SimpleNamespace(**members))
    monkeypatch.delitem(sys.modules, "rekindle.vllm.loader", raising=False)
    made = importlib.import_module("rekindle.vllm.loader")
    monkeypatch.delitem(sys.modules, "rekindle.vllm.loader")
    return made


def test_a_reload_that_vllm_ends_itself_keeps_nothing(loader, monkeypatch):
    monkeypatch.setattr(loader, "whole_tensors", lambda *_: iter([("w", None)]))
    model = nn.Module()
    keep(model)
    found = types.SimpleNamespace(session=None, options=types.SimpleNamespace(load_timeout=1))
    given = loader._given("target", found)
    assert "target" in resident._kept, "vLLM has not begun yet"
    assert next(given)[0] == "w" and not resident._kept
    monkeypatch.setattr(found, "session", types.SimpleNamespace(close=lambda: None))
    given.close()


# --- the kernels that Triton compiles


def load_of_vllm(loader, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm",
                        types.SimpleNamespace(envs=types.SimpleNamespace(VLLM_CACHE_ROOT="/caches")))
    loaded = []

    class Loader(loader.RekindleModelLoader):
        options = types.SimpleNamespace(resident=True)
        _note = None

        def __init__(self):
            pass

    monkeypatch.setattr(loader, "role_of", lambda _: "target")
    monkeypatch.setattr(loader.resident, "look", lambda *_: None)
    monkeypatch.setattr(loader.resident, "load_model",
                        lambda *_: loaded.append(os.environ["TRITON_CACHE_DIR"]))
    Loader().load_model(None, None)
    return loaded


def test_a_successor_looks_for_kernels_where_its_predecessor_kept_them(loader, monkeypatch):
    """torch.compile names a directory only in the worker that compiles the model."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert load_of_vllm(loader, monkeypatch) == ["/caches/triton"]


def test_the_directory_for_kernels_that_a_user_has_named_stays(loader, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    assert load_of_vllm(loader, monkeypatch) == ["/mine"]


# --- tensors


class Block:
    """A block in the memory of this process."""

    def __init__(self, size):
        self.bytes, self.size = torch.zeros(size, dtype=torch.uint8), size
        self.address = self.bytes.data_ptr()


def entry(at, *names):
    return {"names": names, "dtype": "torch.float32", "shape": [4], "stride": [1], "block": 0,
            "at": at, "how": [{"same": [], "set": {}, "own": False}] * len(names)}


def two_names(kind):
    """A kept model of which a tensor has two names."""
    model = nn.Module()
    slots = [(kind, "", "first"), (kind, "", "second")]
    block = Block(16)
    tensor = resident.view(block, entry(0, *slots))
    for slot in slots:
        resident._set(model, slot, nn.Parameter(tensor) if kind == "parameter" else tensor)
    resident._set(model, slots[1], model.first)
    keep(model)
    resident._kept["target"].blocks.append(block)
    resident._kept["target"].about["tensors"].append(entry(0, *slots))
    return model, slots, block


def made_anew(model, slots, *values):
    tensors = [nn.Parameter(torch.full((4,), value)) for value in values]
    for index, slot in enumerate(slots):
        resident._set(model, slot, tensors[index % len(tensors)])


@pytest.mark.parametrize("kind", ["parameter", "attribute"])
def test_a_tensor_with_two_names_moves_back_to_its_place(sealed, kind):
    model, slots, block = two_names(kind)
    for value in (1.0, 2.0):
        resident.note("target")
        with torch.no_grad():
            made_anew(model, slots, value)
            resident.seal_again("target")
        assert model.first is model.second and model.first.tolist() == [value] * 4
        assert model.first.data_ptr() == block.address
    assert len(sealed) == 2


@pytest.mark.parametrize("kind", ["parameter", "attribute"])
def test_two_tensors_that_were_one_before_an_update_stay_two(sealed, caplog, kind):
    model, slots, _ = two_names(kind)
    resident.note("target")
    with torch.no_grad():
        made_anew(model, slots, 1.0, 2.0)
        resident.seal_again("target")
    assert not sealed and "first and second have become two tensors" in caplog.text
    assert (model.first.tolist(), model.second.tolist()) == ([1.0] * 4, [2.0] * 4)


def copy_of(tensors=(), small=()):
    about = {"tensors": list(tensors), "small": list(small), "gone": [], "none": [], "changes": [],
             "rebuild": False}
    return resident.Taken("key", None, about, [Block(64)])


def small(name, value):
    data = torch.full((4,), value).numpy().tobytes()
    return {"names": [("buffer", "", name)], "how": [{}], "dtype": "torch.float32", "shape": [4],
            "bytes": resident.base64.b64encode(data).decode()}


@pytest.mark.parametrize("taken", [
    copy_of([entry(0, ("buffer", "", "first")), entry(16, ("buffer", "", "second"))]),
    copy_of(small=[small("first", 1.0), small("second", 2.0)])], ids=["blocks", "small"])
def test_a_copy_is_refused_where_the_constructor_has_one_tensor_of_two(taken):
    """The second one would overwrite the first one."""
    apart, shared = nn.Module(), nn.Module()
    for model in (apart, shared):
        model.register_buffer("first", torch.zeros(4))
    apart.register_buffer("second", torch.zeros(4))
    shared.register_buffer("second", shared.first)
    resident._bind(apart, taken)
    with pytest.raises(resident.InvalidError, match="shares its"):
        resident._bind(shared, taken)


# --- tensors that are not on the device


LARGE = 2048


def with_table(numbers=LARGE):
    """A model on a device that is not that of its table."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(4, device="meta"))
    model.table = torch.zeros(numbers)
    return model


def of_meta():
    device = types.SimpleNamespace(torch_name="meta")
    return types.SimpleNamespace(session=types.SimpleNamespace(_device=device))


CHANGES = [lambda model: model.table.add_(1),
           lambda model: setattr(model, "table", torch.ones_like(model.table)),
           lambda model: setattr(model, "other", torch.ones_like(model.table))]


@pytest.mark.parametrize("change", CHANGES, ids=["written", "bound", "made"])
def test_a_large_tensor_elsewhere_that_a_load_changes_is_named(change):
    """A successor would have the constructor's."""
    model = with_table()
    before = resident.begin(model)
    assert resident._described(model, before, of_meta(), False)["format"] == resident.FORMAT
    change(model)
    with pytest.raises(resident.NotResident, match="(table|other) on cpu is new, or has changed"):
        resident._described(model, before, of_meta(), False)


@pytest.mark.parametrize("constructed_on", ["cpu", "meta"])
@pytest.mark.parametrize("change", CHANGES, ids=["written", "bound", "made"])
def test_a_successor_gets_a_small_tensor_elsewhere_that_a_load_has_changed(change, constructed_on):
    """vLLM 0.23 makes the ranges of its scales anew: after its load they lie in host memory, where
    the constructor has made them on the GPU."""
    model = with_table(4)
    if constructed_on == "meta":
        model.table = torch.zeros(4, device="meta")
    before = resident.begin(model)
    if constructed_on == "meta":
        model.table = torch.zeros(4)
    change(model)
    described = resident._described(model, before, of_meta(), False)
    names = {entry["names"][0][2] for entry in described["small"]}
    assert names <= {"table", "other"} and len(names) >= 1
    taken = copy_of(small=resident._small(model, described["small"]))
    taken.blocks[0].bytes = torch.empty(64, device="meta")
    successor = with_table(4)
    if constructed_on == "meta":
        successor.table = torch.zeros(4, device="meta")
    successor.weight = None
    resident._bind(successor, taken)
    for name in names:
        assert torch.equal(getattr(successor, name), getattr(model, name)), name


@pytest.mark.parametrize("change", CHANGES[:2], ids=["written", "bound"])
def test_a_tensor_elsewhere_that_an_update_changes_is_named(sealed, caplog, change):
    model = with_table()
    keep(model)
    block = types.SimpleNamespace(bytes=torch.empty(1, device="meta"))
    resident._kept["target"].blocks.append(block)
    resident.note("target")
    resident.seal_again("target")
    assert len(sealed) == 1
    change(model)
    resident.note("target")
    change(model)
    resident.seal_again("target")
    assert len(sealed) == 1 and "table on cpu is new, or has changed" in caplog.text
