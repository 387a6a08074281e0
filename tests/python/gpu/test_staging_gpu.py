"""A staged update on a GPU: while a model computes on the GPU, a version comes beside it; the pause
is the switch alone. Prints the pause beside a plain copy of the same bytes on the device.

    python -m pytest -s tests/python/gpu/test_staging_gpu.py

Without a GPU these are skipped, and fail when REKINDLE_REQUIRE_GPU is set.
REKINDLE_TEST_DEVICES=double runs them on a double, with small tensors. REKINDLE_TEST_STAGED_GIB is
the size of the model on a GPU, 8 by default.
"""
import os
import time

import pytest
import torch
from conftest import PATIENCE_S, gpu_or_double_store
from torch import nn

import rekindle as rk
from rekindle import torch as rekindle_torch

DOUBLE = os.environ.get("REKINDLE_TEST_DEVICES") == "double"
DEVICE, ON = ("double:0", "cpu") if DOUBLE else ("cuda:0", "cuda:0")
GIB = 1 << 30
LAYERS = 64
LAYER_BYTES = (1 << 20) if DOUBLE else int(
    float(os.environ.get("REKINDLE_TEST_STAGED_GIB", "8")) * GIB) // LAYERS


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.zeros(LAYER_BYTES // 4, device=ON), requires_grad=False)
            for _ in range(LAYERS))


@pytest.fixture(scope="module")
def store(memory_directory):
    with gpu_or_double_store(memory_directory, DOUBLE, "a staged update has not run on CUDA") as store:
        yield store


@pytest.fixture(scope="module")
def versions(store):
    for version in (1, 2):
        rk.publish({f"layers.{i}": torch.full((LAYER_BYTES // 4,), version * 100.0 + i)
                    for i in range(LAYERS)}, f"staged@{version}", agent=store)


def synchronize():
    if not DOUBLE:
        torch.cuda.synchronize()


def has(model, version):
    return all(bool((value == version * 100.0 + i).all()) for i, value in enumerate(model.layers))


def plain_copy_seconds(model):
    """Of the same bytes, tensor by tensor, between two places on the device."""
    source = [torch.empty_like(value) for value in model.layers]
    target = [torch.empty_like(value) for value in model.layers]
    best = float("inf")
    for _ in range(3):
        synchronize()
        begun = time.perf_counter()
        for to, value in zip(target, source):
            to.copy_(value)
        synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def test_the_pause_of_a_staged_update_is_the_switch_alone(store, versions):
    where = {"agent": store, "device": DEVICE, "instance": "staged", "timeout": PATIENCE_S}
    model = Layers()
    first = rekindle_torch.load(model, "staged", 1, generation=0, **where)
    first.commit(PATIENCE_S)
    replay = captured_sum(model)
    places = [value.data_ptr() for value in model.layers]
    begun, steps = time.perf_counter(), 0
    with rekindle_torch.stage(model, "staged", 2, staging="require", reserve_bytes=0, generation=1,
                              load_timeout=PATIENCE_S, **where) as staged:
        while not staged.wait(0.0):
            assert replay() == expected(1), "the old version computes while the new one comes"
            steps += 1
        serving = time.perf_counter() - begun
        assert has(model, 1) and replay() == expected(1)
        paused = time.perf_counter()
        second = staged.switch()
        pause = time.perf_counter() - paused
    assert has(model, 2) and replay() == expected(2), "the captured graph reads the new weights"
    assert [value.data_ptr() for value in model.layers] == places
    first.close()
    second.close()
    plain = plain_copy_seconds(model)
    print(f"\nstaged update of {LAYERS * LAYER_BYTES / GIB:.3f} GiB on {DEVICE}: {serving:.3f} s "
          f"beside {steps} steps, pause {pause:.4f} s, plain copy on the device {plain:.4f} s; "
          + ", ".join(f"{name} {took:.4f} s" for name, took in staged.phases.items()))


def expected(version):
    return sum(version * 100.0 + i for i in range(LAYERS))


def captured_sum(model):
    """Returns a function that adds the first elements of all layers, on a GPU by a CUDA graph."""
    total = torch.zeros((), device=ON)

    def run():
        total.zero_()
        for value in model.layers:
            total.add_(value[0])

    if DOUBLE:
        def replay():
            run()
            return float(total)
        return replay
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay_graph():
        graph.replay()
        torch.cuda.synchronize()
        return float(total)
    return replay_graph


def test_a_gpu_without_room_refuses_with_numbers(store, versions):
    if DOUBLE:
        reserve = 8 * GIB
    else:
        reserve = torch.cuda.mem_get_info(0)[1]
    model = Layers()
    with pytest.raises(rk.ExhaustedError, match="no room to stage staged@2"):
        rekindle_torch.stage(model, "staged", 2, staging="require", reserve_bytes=reserve,
                             agent=store, device=DEVICE)
