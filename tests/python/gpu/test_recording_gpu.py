"""Recorded loaders, and what engines' integrations do with them, for models on a real GPU.

    python -m pytest tests/python/gpu/test_recording_gpu.py

Without a GPU these are skipped, and fail when REKINDLE_REQUIRE_GPU is set.
REKINDLE_TEST_DEVICES=double runs them on a double.
"""
import os
import sys

import pytest
import torch
from conftest import PATIENCE_S, Rekindle, gpu_fleet

pytest.register_assert_rewrite("recording_fakes")

from recording_fakes import garbage, same_bits  # noqa: E402
from test_recording_loaders import Quantizing, Rank, checkpoint  # noqa: E402

import rekindle as rk  # noqa: E402
from rekindle import _loading, recording  # noqa: E402
from rekindle._engines import loading  # noqa: E402
from rekindle._engines.options import Options  # noqa: E402

DOUBLE = os.environ.get("REKINDLE_TEST_DEVICES") == "double"
DEVICE, ON = ("double:0", "cpu") if DOUBLE else ("cuda:0", "cuda:0")  # of Rekindle, of torch
WIDE, LARGE = 2048, 24  # tensors of 8 MiB each


def wide(seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"experts.{i:02}": torch.randn(WIDE, WIDE, generator=generator).bfloat16()
            for i in range(LARGE)}


@pytest.fixture(scope="module")
def store(memory_directory):
    if DOUBLE:
        running = Rekindle(memory_directory)
        yield running.store("a")
        running.close()
        return
    with gpu_fleet(memory_directory, "recorded loaders have not run on CUDA") as running:
        yield running.store("a")


@pytest.fixture(scope="module", autouse=True)
def published(store, tmp_path_factory):
    rk.publish(checkpoint(), "ranks@1", agent=store)
    changed = {name: tensor * 2 for name, tensor in checkpoint().items()}
    rk.publish(changed, "ranks@2", agent=store)
    rk.publish(wide(1), "wide@1", agent=store, timeout=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REKINDLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def fresh(kind, tp, size):
    with torch.no_grad():
        model = kind(tp, size).to(ON)
        for parameter in model.parameters():
            parameter.copy_(garbage(parameter))
    return model


def loaded(kind, tp, size, tensors):
    model = fresh(kind, tp, size)
    model.load_weights(tensors.items())
    return model


def assert_same(model, wanted):
    for name, parameter in wanted.named_parameters():
        assert same_bits(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("record_device", sorted({ON, "cpu"}))
@pytest.mark.parametrize("kind", [Rank, Quantizing])
@pytest.mark.parametrize("tp", range(2))
def test_a_rank_gets_what_its_loader_reads(store, kind, tp, record_device):
    model = fresh(kind, tp, 2)
    with recording.attach(model.load_weights, model, {"tp": [tp, 2]}, "ranks", 1, agent=store,
                          device=DEVICE, record_device=record_device,
                          timeout=PATIENCE_S) as session:
        assert session.device_path == "ipc", session.device_path
        session.commit(timeout=PATIENCE_S)
    assert_same(model, loaded(kind, tp, 2, checkpoint()))


def transposed(fused, name, tensor):
    fused[int(name[-2:])].copy_(tensor.t())


def sliced(fused, name, tensor):
    fused[int(name[-2:]), ::2, 16:].copy_(tensor[1::2, 16:])


def as_it_is(fused, name, tensor):
    fused[int(name[-2:])].copy_(tensor)


@pytest.mark.parametrize("most", [256 << 20, 0], ids=["buffered", "one-by-one"])
@pytest.mark.parametrize("place", [transposed, sliced, as_it_is])
def test_large_tensors_in_any_layout(store, place, most, monkeypatch):
    monkeypatch.setattr(sys.modules["rekindle.recording.execute"], "MOST_BUFFERED", most)
    monkeypatch.setattr(_loading, "MOST_BUFFERED", most)
    fused, wanted = (torch.zeros(LARGE, WIDE, WIDE, dtype=torch.bfloat16, device=ON)
                     for _ in range(2))

    def load(tensors):
        for name, tensor in tensors:
            place(fused, name, tensor)

    for name, tensor in wide(1).items():
        place(wanted, name, tensor.to(ON))
    with recording.attach(load, {"fused": fused}, {"place": place.__name__}, "wide", 1,
                          agent=store, device=DEVICE, record_device=ON,
                          timeout=PATIENCE_S) as session:
        session.commit(timeout=PATIENCE_S)
    assert torch.equal(fused, wanted)


@pytest.mark.parametrize("record", [True, False], ids=["recorded", "whole"])
def test_an_engines_model_is_filled_and_updated(store, record):
    """As load format rekindle does it: the second version goes to the memory of the first."""
    model = fresh(Rank, 0, 2)
    options = Options(model="ranks", version=1, agent=str(store), record=record,
                      device=DEVICE if DOUBLE else None)
    memory = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for version, factor in ((1, 1), (2, 2)):
        found = loading.fill(model, model.load_weights,
                             loading._pinned(options, version), loading.ALONE, [Rank])
        assert found.device == DEVICE and found.session.device_path == "ipc"
        assert_same(model, loaded(Rank, 0, 2, {
            name: tensor * factor for name, tensor in checkpoint().items()}))
    assert memory == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    loading.let_go("target")
