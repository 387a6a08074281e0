"""Publishing from a real GPU: every byte arrives, and the trainer's stream does not wait.

    python -m pytest tests/python/gpu/test_publish_gpu.py

Without a GPU these are skipped, and fail when REKINDLE_REQUIRE_GPU is set.
"""
import ctypes
import os

import pytest
import torch
from conftest import gpu_fleet
from copy_places import DTYPES, expected, layouts, places_for

import rekindle as rk
from rekindle import _pinned_copies
from rekindle._host_copies import HostCopies

MIB = 1 << 20
SECOND = 2_000_000_000  # cycles, about


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        assert not os.environ.get("REKINDLE_REQUIRE_GPU"), "there is no GPU"
        pytest.skip("no GPU: publishing has not run on CUDA")


def layouts_on_gpu():
    return [_on_gpu(tensor) for name in DTYPES for tensor in layouts(name)]


def _on_gpu(tensor):
    """With the same strides: .cuda() would make the tensor contiguous."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage).cuda()
    return torch.empty(0, dtype=tensor.dtype, device="cuda").set_(
        flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("block", [None, 256])
def test_every_layout_of_every_dtype_arrives(monkeypatch, streaming, block):
    if block is not None:
        monkeypatch.setattr(_pinned_copies, "BLOCK", block)
        monkeypatch.setattr(_pinned_copies, "_kept", [])
    tensors = list(layouts_on_gpu())
    memory, places = places_for(tensors)
    with HostCopies(streaming=streaming) as copies:
        for tensor, place in zip(tensors, places):
            copies.add(tensor, place)
        copies.finish()
    assert memory.raw == expected(tensors)


def test_large_tensors_arrive_from_any_stream():
    place = (ctypes.c_char * (300 * MIB + 40))()
    stream = torch.cuda.Stream()
    for turn in range(3):
        with torch.cuda.stream(stream), HostCopies() as copies:
            torch.cuda._sleep(SECOND // 20)
            source = torch.randint(-9, 9, (75 * MIB + 10,), dtype=torch.int32, device="cuda")
            known = source.clone()
            copies.add(source, place)
            del source  # Its memory is reused only after the copy.
            torch.zeros(75 * MIB + 10, dtype=torch.int32, device="cuda")
            copies.finish()
        stream.synchronize()
        assert torch.equal(torch.frombuffer(place, dtype=torch.int32), known.cpu())


def test_work_that_is_queued_later_neither_waits_nor_delays():
    source = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
    place = (ctypes.c_char * source.nbytes)()
    with HostCopies(streaming=False) as copies:
        copies.add(source[:32 * MIB], (ctypes.c_char * (32 * MIB)).from_buffer(place))
        torch.cuda._sleep(SECOND)
        after = torch.cuda.current_stream().record_event()
        copies.add(source[32 * MIB:], (ctypes.c_char * (32 * MIB)).from_buffer(place, 32 * MIB))
        copies.finish()
        assert not after.query(), "the copies waited for work that came later"
    assert bytes(place) == b"\7" * len(place)
    after.synchronize()


def test_the_current_stream_runs_while_copies_wait(monkeypatch):
    """The side streams have work of a second before the copies."""
    ring = _pinned_copies._Ring.take(torch)
    for stream in ring.streams(torch.device("cuda", torch.cuda.current_device())):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SECOND)
    monkeypatch.setattr(_pinned_copies, "_kept", [ring])
    source = torch.full((1000,), 7, dtype=torch.uint8, device="cuda")
    place = (ctypes.c_char * 1000)()
    with HostCopies() as copies:
        copies.add(source, place)
        copies._pinned._queue_batch()
        torch.cuda.current_stream().synchronize()
        assert not copies._pinned._queued[0].landed.query(), "the caller's stream waited"
        copies.finish()
    assert bytes(place) == b"\7" * 1000


def test_an_error_leaves_no_writer_and_a_ring_that_works():
    source = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    place = (ctypes.c_char * source.nbytes)()
    with pytest.raises(KeyboardInterrupt), HostCopies() as copies:
        copies.add(source, place)
        raise KeyboardInterrupt
    with HostCopies() as copies:
        copies.add(source, place)
        copies.finish()
    assert bytes(place) == b"\1" * len(place)
    rk.publication.release_pinned()
    assert not _pinned_copies._kept


def test_a_model_is_published_as_it_is(memory_directory):
    with gpu_fleet(memory_directory, "publishing has not run on CUDA") as running:
        store = running.store("a")
        known = {f"t{i}": tensor for i, tensor in enumerate(layouts_on_gpu())}
        known |= {f"small{i}": torch.randn(5, device="cuda") for i in range(3000)}
        known |= {"large": torch.randn(9000, 3000, device="cuda").t(), "host": torch.randn(70, 7)}
        rk.publish(known, "m@1", files={"config.json": b"{}"}, agent=store)
        with rk.attach("m", agent=store) as session:
            found = dict(session)
            assert found.keys() == known.keys()
            for name, tensor in known.items():
                assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
                left = found[name].contiguous().reshape(-1).view(torch.uint8)
                right = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
                assert torch.equal(left, right), name
