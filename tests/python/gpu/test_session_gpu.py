"""Sessions on real GPUs: views of buckets, copies into parameters, streams, publishing from one.

    python -m pytest tests/python/gpu/test_session_gpu.py

Without a GPU these are skipped, and fail when REKINDLE_REQUIRE_GPU is set.
"""

import pytest
import torch
from conftest import PATIENCE_S, gpu_fleet

import rekindle as rk
from rekindle import _loading


@pytest.fixture(scope="module")
def gpu_store(memory_directory):
    with gpu_fleet(memory_directory, "sessions have not run on CUDA") as running:
        yield running.store("a")


@pytest.fixture(scope="module")
def published(gpu_store):
    """On the GPU: 600 tensors, one of them larger than a bucket."""
    torch.manual_seed(2)
    known = {f"w{i}": torch.randn(256, 300 + i, device="cuda") for i in range(600)}
    known["large"] = torch.randn(20_000, 1000, device="cuda").bfloat16()
    known["half"] = torch.randn(33, 7, device="cuda").to(torch.float8_e4m3fn)
    known["scalar"] = torch.tensor(2.5, device="cuda")
    known["empty"] = torch.zeros(0, 4, device="cuda")
    rk.publish(known, "m@1", files={"config.json": b"{}"}, agent=gpu_store)
    return known


def same(found, known):
    assert found.keys() == known.keys()
    for name, tensor in known.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        left, right = found[name].reshape(-1), tensor.reshape(-1)
        assert torch.equal(left.view(torch.uint8).cpu(), right.view(torch.uint8).cpu()), name


def attach(store, **more):
    more = {"device": "cuda", **more}
    return rk.attach("m", bucket_bytes=16 << 20, agent=store, timeout=PATIENCE_S, **more)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "torch", "uuid"])
def test_views_of_buckets_are_what_was_published(gpu_store, published, device):
    device = {"torch": torch.device("cuda", 0),
              "uuid": f"GPU-{torch.cuda.get_device_properties(0).uuid}"}.get(device, device)
    with attach(gpu_store, device=device) as session:
        found = {}
        for bucket in session.buckets(timeout=PATIENCE_S):
            for name, tensor in bucket:
                assert tensor.device == torch.device("cuda", 0)
                found[name] = tensor.clone()
        assert session.device_path == "ipc", session.device_path
        assert session.files == {"config.json": b"{}"}
        session.commit(timeout=PATIENCE_S)
    same(found, published)


@pytest.mark.parametrize("own_stream", [False, True])
def test_load_into_fills_tensors_on_the_gpu(gpu_store, published, own_stream):
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        into = {name: torch.full_like(t, 1) for name, t in published.items()}
        with attach(gpu_store) as session:
            assert session.load_into(into) == ([], [])
            session.commit(timeout=PATIENCE_S)
    same(into, published)


@pytest.mark.parametrize("most", [_loading.MOST_BUFFERED, 0], ids=["in-batches", "one-by-one"])
def test_other_dtypes_places_and_layouts_go_through_a_buffer(gpu_store, published, monkeypatch,
                                                             most):
    monkeypatch.setattr(_loading, "MOST_BUFFERED", most)
    into = {name: torch.full_like(t, 1) for name, t in published.items()}
    into["half"] = torch.zeros(33, 7, device="cuda")
    into["w3"] = torch.zeros(303, 256, device="cuda").t()
    into["w4"] = torch.zeros(256, 304)  # of the host
    with attach(gpu_store, stream=torch.cuda.Stream()) as session:
        session.load_into(into)
    assert torch.equal(into["half"].cpu(), published["half"].float().cpu())
    assert torch.equal(into["w3"], published["w3"]) and into["w3"].stride() == (1, 256)
    assert torch.equal(into["w4"], published["w4"].cpu())
    assert torch.equal(into["large"], published["large"])


def test_from_the_host_map_into_the_gpu(gpu_store, published):
    into = {name: torch.full_like(t, 1) for name, t in published.items()}
    with attach(gpu_store, device=None) as session:
        session.load_into(into)
    same(into, published)


def test_forty_thousand_tensors(gpu_store):
    whole = torch.randn(40_000, 1024, device="cuda")
    rk.publish({f"t.{i}": whole[i] for i in range(40_000)}, "many@1", agent=gpu_store, timeout=None)
    into = torch.zeros_like(whole)
    with rk.attach("many", device="cuda", agent=gpu_store, timeout=PATIENCE_S) as session:
        session.load_into({f"t.{i}": into[i] for i in range(40_000)})
        session.commit(timeout=PATIENCE_S)
    assert torch.equal(into, whole)
