"""When a model that outlives its worker is sealed and noted: rules that need no agent and no engine."""
import sys
import types

import pytest
from torch import nn

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
                "initialize_layerwise_reload": nothing, "finalize_layerwise_reload": nothing}}.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", types.SimpleNamespace(**members))
    monkeypatch.delitem(sys.modules, "rekindle.vllm.transfer", raising=False)
    from rekindle.vllm import transfer as backend
    monkeypatch.setattr(backend, "bring", nothing)
    monkeypatch.setattr(backend, "abandon", nothing)
    monkeypatch.setattr(backend, "replace", lambda options, **_: options)
    yield backend
    del sys.modules["rekindle.vllm.transfer"]


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
