"""Copies to host memory: every byte arrives, and nothing writes after an end.

The path of GPUs runs here on CPU tensors, with streams that do all work at once. tests/python/gpu
has the same with a GPU.
"""
import contextlib
import ctypes
import os
import signal
import threading
import time
import types

import numpy
import pytest
import torch
from copy_places import DTYPES, expected, layouts, patterns, places_for

from rekindle import _copy_threads, _host_copies, _pinned_copies
from rekindle._copy_threads import Copy, CopyThreads
from rekindle._host_copies import HostCopies
from rekindle._pinned_copies import PinnedCopies
from rekindle.errors import InvalidError

MIB = 1 << 20


def copy(tensors, gap=3):
    memory, places = places_for(tensors, gap)
    with HostCopies() as copies:
        for tensor, place in zip(tensors, places):
            copies.add(tensor, place)
        copies.finish()
        assert memory.raw == expected(tensors, gap)
    return memory


def threads():
    """The number of threads that copy."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
                count += file.read().strip() == "rk-copy"
    return count


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert not threads()


@pytest.mark.parametrize("name", DTYPES)
def test_every_layout_of_every_dtype_arrives(name):
    copy(list(layouts(name)))


def test_large_memory_arrives():
    large = torch.randint(0, 255, (20 * MIB + 5,), dtype=torch.uint8)
    memory, places = places_for([large, large[1:]])
    with HostCopies() as copies:
        copies.add(large, places[0])
        copies.add(large.numpy()[1:], places[1])
        copies.finish()
    assert numpy.array_equal(numpy.frombuffer(places[0], "uint8"), large.numpy())
    assert numpy.array_equal(numpy.frombuffer(places[1], "uint8"), large.numpy()[1:])


def test_sources_live_until_they_are_copied(monkeypatch):
    monkeypatch.setattr(_copy_threads, "MOST_KEPT", 9 * MIB)
    memory, places = places_for([torch.empty(3 * MIB, dtype=torch.uint8)] * 20)
    with HostCopies() as copies:
        for value, place in enumerate(places):
            copies.add(torch.full((3 * MIB,), value, dtype=torch.uint8), place)
        copies.finish()
    for value, place in enumerate(places):
        assert bytes(place) == bytes([value]) * (3 * MIB)


def test_arrays_and_buffers_arrive():
    array = numpy.arange(24, dtype=">f4").reshape(4, 6)
    memory, places = places_for([array, array, array[:, ::2], array.astype("<i8"), b_view()])
    with HostCopies() as copies:
        for source, place in zip([array, array.astype("<f4"), array[:, ::2], array.astype("<i8"),
                                  b_view()], places):
            copies.add(source, place)
        copies.finish()
    native = array.astype("<f4")
    assert memory.raw == expected([native, native, native[:, ::2], native.astype("<i8"), b_view()])


def b_view():
    return memoryview(bytes(range(17)))


def test_elements_with_a_pending_negation_are_resolved():
    negated = torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag
    assert negated.is_neg()
    copy([negated])


def test_a_parameter_needs_no_gradient():
    copy([torch.nn.Parameter(torch.randn(5, 3)).t()])


def test_another_size_is_refused():
    with HostCopies() as copies, pytest.raises(InvalidError, match="of 12 bytes .* place of 8"):
        copies.add(torch.zeros(3), (ctypes.c_char * 8)())


def test_an_interrupted_copy_leaves_no_writer(monkeypatch):
    monkeypatch.setattr(_copy_threads, "MOST_KEPT", 1 << 40)  # Then add() waits for no copy.
    source = torch.ones(256 * MIB, dtype=torch.uint8)
    place = (ctypes.c_char * source.nbytes)()
    last = (ctypes.c_char * (16 * MIB))()
    with pytest.raises(KeyboardInterrupt):
        with HostCopies() as copies:
            for _ in range(400):  # More than the threads can do before the interrupt.
                copies.add(source, place)
            copies.add(source[:len(last)], last)
            raise KeyboardInterrupt
    assert not threads()
    assert last[len(last) - 1] == b"\0"


def test_a_real_interrupt_ends_a_wait(monkeypatch):
    threads = CopyThreads()
    monkeypatch.setattr(_copy_threads, "SLICE_S", 0.01)
    interrupt = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        threads.wait(1)  # No copy has this number.
    threads.close()


def test_a_child_of_fork_leaves_the_copies_to_its_parent():
    copies = CopyThreads()
    source, place = (ctypes.c_char * MIB)(), (ctypes.c_char * MIB)()
    copies.wait(copies.put([Copy(ctypes.addressof(place), ctypes.addressof(source), MIB)]))
    child = os.fork()
    if child == 0:
        try:
            copies.put([])
        except InvalidError:
            copies.close()
            os._exit(0)
        os._exit(1)
    deadline = time.monotonic() + 60
    status = (0, 0)
    while status == (0, 0) and time.monotonic() < deadline:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if status == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status == (child, 0)
    copies.close()


def test_copies_without_close_end_with_their_last_reference():
    copies = HostCopies()
    source = torch.ones(16 * MIB, dtype=torch.uint8)
    place = (ctypes.c_char * source.nbytes)()
    copies.add(source, place)
    while place[0] == b"\0":  # A thread has begun.
        time.sleep(0.001)
    del copies
    assert not threads()


class _Stream:
    """A stream that has done everything."""

    def __init__(self, device=None):
        self.waits = 0

    def wait_event(self, event):
        self.waits += 1

    def record_event(self):
        return None

    def synchronize(self):
        pass


class _Event:
    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def on_cpu(monkeypatch):
    """torch whose CPU is a GPU, and small blocks."""
    monkeypatch.setattr(_pinned_copies, "BLOCK", 256)
    monkeypatch.setattr(_pinned_copies, "_kept", [])
    current = _Stream()
    cuda = types.SimpleNamespace(
        Stream=_Stream, Event=_Event, stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda device: current)
    yield types.SimpleNamespace(
        uint8=torch.uint8, bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32,
        cuda=cuda, cat=torch.cat,
        empty=lambda size, pin_memory=False, **more: torch.empty(size, **more))


def through_the_ring(stand_in, tensors, streaming, gap):
    memory, places = places_for(tensors, gap)
    copier = CopyThreads()
    copies = PinnedCopies(stand_in, copier, streaming)
    try:
        for tensor, place in zip(tensors, places):
            if len(place):
                copies.add(tensor, ctypes.addressof(place))
        copies.flush()
        copier.finish()
    finally:
        copier.close()
        copies.close()
    assert memory.raw == expected(tensors, gap)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("name", DTYPES)
def test_blocks_hold_all_layouts(on_cpu, name, gap, streaming):
    rows_larger_than_a_block = patterns(name, 300, 3).t()
    through_the_ring(on_cpu, [*layouts(name), rows_larger_than_a_block, *layouts(name)], streaming,
                     gap)


def test_one_ring_stays_for_the_next(on_cpu):
    tensors = [patterns("F32", 5000)]
    through_the_ring(on_cpu, tensors, False, 0)
    (kept,) = _pinned_copies._kept
    through_the_ring(on_cpu, tensors, False, 0)
    assert _pinned_copies._kept == [kept]
    _pinned_copies.release_pinned()
    assert not _pinned_copies._kept


def test_streams_wait_for_the_caller_once_or_each_time(on_cpu):
    tensors = [patterns("F32", 5000)]
    waits = []
    for streaming in (False, True):
        through_the_ring(on_cpu, tensors, streaming, 0)
        (kept,) = _pinned_copies._kept
        waits.append(sum(stream.waits for stream in kept.streams(torch.device("cpu"))))
        _pinned_copies._kept.clear()
    assert waits == [2, -(-tensors[0].nbytes // 256)]


def test_neighbours_are_copied_together(on_cpu, monkeypatch):
    put, copies = CopyThreads.put, []
    monkeypatch.setattr(CopyThreads, "put", lambda self, some, *more: (
        copies.extend(some), put(self, some, *more))[1])
    through_the_ring(on_cpu, [patterns("F32", 4) for _ in range(16)], False, 0)
    assert len(copies) == 1 and copies[0].nbytes == 256


def test_small_tensors_are_joined_before_they_leave_the_device(on_cpu):
    joined = []
    on_cpu.cat = lambda parts, out: (joined.append(len(parts)), torch.cat(parts, out=out))[1]
    through_the_ring(on_cpu, [patterns("F32", 4) for _ in range(40)], False, 3)
    assert joined == [16, 16, 8]


def test_a_device_without_memory_joins_nothing(on_cpu):
    empty = on_cpu.empty

    def refuse(size, **more):
        if "pin_memory" not in more:
            raise RuntimeError("out of memory")
        return empty(size, **more)

    on_cpu.empty = refuse
    through_the_ring(on_cpu, [patterns("F32", 4) for _ in range(40)], False, 3)


def test_a_host_that_cannot_pin_copies_without_a_ring(monkeypatch):
    def refuse(torch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(_host_copies, "PinnedCopies", lambda *all: refuse(None))
    copies = HostCopies()
    assert not copies._can_pin() and not copies._can_pin()
    copies.close()
