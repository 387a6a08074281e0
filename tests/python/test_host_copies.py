"""Copies to host memory: every byte arrives, and nothing writes after an end.

The path of GPUs runs here on CPU tensors, with streams that do all work at once. tests/python/gpu
has the same with a GPU.
"""
import contextlib
import ctypes
import os
import signal
import threading
import types

import numpy
import pytest
import torch
from copy_places import DTYPES, expected, layouts, patterns, places_for

from rekindle import _host_copies, _pinned_copies
from rekindle._copy_threads import CopyThreads, Piece
from rekindle._host_copies import HostCopies
from rekindle._pinned_copies import PinnedCopies
from rekindle.errors import InvalidError, StaleError

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
    """Those that copy. One that has copied its last byte may still be on its way out."""
    return [one for one in threading.enumerate()
            if one.name == "rekindle-copy" and not one.ended.is_set()]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert not threads()


@pytest.mark.parametrize("name", DTYPES)
def test_every_layout_of_every_dtype_arrives(name):
    copy(list(layouts(name)))


def test_large_memory_is_copied_by_several_threads(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    large = torch.randint(0, 255, (20 * MIB + 5,), dtype=torch.uint8)
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start",
                        lambda thread: (started.append(thread), start(thread)))
    memory, places = places_for([large, large[1:]])
    with HostCopies() as copies:
        copies.add(large, places[0])
        copies.add(large.numpy()[1:], places[1])
        copies.finish()
    assert numpy.array_equal(numpy.frombuffer(places[0], "uint8"), large.numpy())
    assert numpy.array_equal(numpy.frombuffer(places[1], "uint8"), large.numpy()[1:])
    assert len(started) == 6


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
    entered, leave, inside = threading.Event(), threading.Event(), []

    @contextlib.contextmanager
    def hold():
        inside.append(1)
        entered.set()
        leave.wait()
        yield
        inside.pop()

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    source = torch.ones(64 * MIB, dtype=torch.uint8)
    place = (ctypes.c_char * source.nbytes)()
    with pytest.raises(KeyboardInterrupt):
        with HostCopies(hold) as copies:
            copies.add(source, place)
            entered.wait()
            threading.Timer(0.1, leave.set).start()
            raise KeyboardInterrupt
    assert not threads() and not inside
    assert place[source.nbytes - 1] == b"\0"


@pytest.mark.parametrize("step", ["finish", "close"])
def test_a_real_interrupt_waits_for_the_writers(step, monkeypatch):
    """Before Python 3.13, an interrupted join() takes a running thread for ended."""
    leave, inside = threading.Event(), []

    @contextlib.contextmanager
    def hold():
        inside.append(1)
        leave.wait()
        yield
        inside.pop()

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    source = torch.ones(64 * MIB, dtype=torch.uint8)
    place = (ctypes.c_char * source.nbytes)()
    interrupt = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    release = threading.Timer(0.3, leave.set)
    with pytest.raises(KeyboardInterrupt):
        with HostCopies(hold) as copies:
            copies.add(source, place)
            interrupt.start()
            release.start()
            getattr(copies, step)()
    assert leave.is_set() and not inside
    assert place[source.nbytes - 1] == b"\0"


def test_an_error_of_a_thread_is_raised():
    @contextlib.contextmanager
    def hold():
        raise StaleError("the publication was closed")
        yield

    source = torch.ones(40 * MIB, dtype=torch.uint8)
    with HostCopies(hold) as copies:
        copies.add(source, (ctypes.c_char * source.nbytes)())
        with pytest.raises(StaleError, match="was closed"):
            copies.finish()


def test_copies_without_close_end_with_their_last_reference():
    copies = HostCopies()
    source = torch.ones(16 * MIB, dtype=torch.uint8)
    place = (ctypes.c_char * source.nbytes)()
    copies.add(source, place)
    running = threads()
    assert running
    del copies
    for thread in running:
        thread.join(60)
        assert not thread.is_alive()


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
        uint8=torch.uint8, cuda=cuda,
        empty=lambda size, pin_memory, **more: torch.empty(size, **more))


def through_the_ring(stand_in, tensors, streaming, gap):
    memory, places = places_for(tensors, gap)
    copier = CopyThreads(contextlib.nullcontext)
    copies = PinnedCopies(stand_in, copier, streaming)
    try:
        for tensor, place in zip(tensors, places):
            if len(place):
                copies.add(tensor, ctypes.addressof(place))
        copies.flush()
        copier.finish()
        copier.check()
    finally:
        copier.stop()
        copier.finish()
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
    put, pieces = CopyThreads.put, []
    monkeypatch.setattr(CopyThreads, "put", lambda self, some, *more: (
        pieces.extend(some), put(self, some, *more)))
    through_the_ring(on_cpu, [patterns("F32", 4) for _ in range(16)], False, 0)
    assert len(pieces) == 1 and isinstance(pieces[0], Piece) and pieces[0].nbytes == 256


def test_a_host_that_cannot_pin_copies_without_a_ring(monkeypatch):
    def refuse(torch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(_host_copies, "PinnedCopies", lambda *all: refuse(None))
    copies = HostCopies()
    assert not copies._can_pin() and not copies._can_pin()
    copies.close()
