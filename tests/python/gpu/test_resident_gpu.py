"""A worker on a GPU is killed, and its successor maps the parameters that it left. Prints how long the load of the
successor takes, beside a load from the host's copy and an upload of the same bytes, all in processes whose CUDA is up.

    python -m pytest -s tests/python/gpu/test_resident_gpu.py

Without a GPU these are skipped, and fail when REKINDLE_REQUIRE_GPU is set.
REKINDLE_TEST_DEVICES=double runs them on a double, with small tensors. REKINDLE_TEST_RESIDENT_GIB is the size of the
model on a GPU, 8 by default.
"""
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import pytest
import torch
from conftest import PATIENCE_S, gpu_or_double_store

import rekindle as rk

DOUBLE = os.environ.get("REKINDLE_TEST_DEVICES") == "double"
DEVICE, ON = ("double:0", "cpu") if DOUBLE else ("cuda:0", "cuda:0")
GIB = 1 << 30
LAYERS = 64
VALUES = 4
LAYER_BYTES = (1 << 20) if DOUBLE else int(
    float(os.environ.get("REKINDLE_TEST_RESIDENT_GIB", "8")) * GIB) // LAYERS
# A successor that dies within a minute gives its copy up, so each round begins with a load.
ROUNDS = 1 if DOUBLE else 3
WORKER = pathlib.Path(__file__).with_name("resident_worker.py")


@pytest.fixture(scope="module")
def store(memory_directory):
    with gpu_or_double_store(memory_directory, DOUBLE, "resident weights have not run on CUDA") as store:
        yield store


@pytest.fixture(scope="module")
def published(store):
    # Few tensors, so that a model of half of this host's memory can be published.
    values = [torch.full((LAYER_BYTES // 4,), 100.0 + i) for i in range(VALUES)]
    rk.publish({f"layers.{i}": values[i % VALUES] for i in range(LAYERS)}, "resident@1", agent=store)


def work(store, resident):
    """Runs a worker until it has committed, then kills it. Returns what it printed."""
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), str(store), DEVICE, ON, str(LAYERS), str(LAYER_BYTES),
         "yes" if resident else "no"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = worker.stdout.readline()
    worker.kill()
    errors = worker.communicate(timeout=PATIENCE_S)[1]
    assert line, errors
    answer = json.loads(line)
    known = [100.0 + i % VALUES for i in range(LAYERS)]
    assert answer["first"] == known and answer["last"] == known
    return answer


def upload_s():
    """Of as many bytes from pinned memory."""
    if DOUBLE:
        return float("nan")
    source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(GIB, dtype=torch.uint8, device=ON)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(max(1, LAYERS * LAYER_BYTES // GIB)):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def test_a_successor_maps_what_a_killed_worker_left(store, published, capsys):
    loads, maps, uploads = [], [], []
    for _ in range(ROUNDS):
        first = work(store, True)
        assert first["rung"] in ("local", "adopted")
        second = work(store, True)
        assert second["rung"] == "resident"
        plain = work(store, False)
        loads.append(plain["load_s"])
        maps.append(second["load_s"])
        uploads.append(upload_s())
    with capsys.disabled():
        print(f"\n{LAYERS * LAYER_BYTES / GIB:.1f} GiB: mapped and checked in "
              f"{statistics.median(maps):.3f} s; loaded from the host in "
              f"{statistics.median(loads):.3f} s; uploaded in {statistics.median(uploads):.3f} s")
