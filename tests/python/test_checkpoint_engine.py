"""Sessions to checkpoint-engine's own receiver, in a process of its own: its protocol code as it
is, with a stand-in for the device's module where there is no GPU."""
import os
import signal

import checkpoint_engine_receiver as receiver
import pytest
import torch
from checkpoint_engine_receiver import Receiver
from conftest import PATIENCE_S, eventually

import rekindle as rk
from rekindle.compat import checkpoint_engine as ce
from rekindle.compat.checkpoint_engine import channel

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
          torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def make_tensors(seed=0):
    """All dtypes, a scalar, one without elements, odd sizes, many small ones, one of 3 MiB."""
    random = torch.Generator().manual_seed(seed)

    def of(dtype, *shape):
        whole = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=random)
        return whole.to(torch.float32).to(dtype)

    tensors = {f"dtype.{dtype}".replace("torch.", ""): of(dtype, 7, 13) for dtype in DTYPES}
    tensors |= {f"layers.{index}.w": of(torch.bfloat16, 31, 64 + index) for index in range(60)}
    return tensors | {"scalar": of(torch.float32), "empty": of(torch.bfloat16, 0, 4),
                      "large": of(torch.float32, 3, 1 << 18)}


def expected(tensors):
    return {name: [str(tensor.dtype), list(tensor.shape), receiver.digest(tensor)]
            for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def published(rekindle):
    tensors = make_tensors()
    rk.publish(tensors, "senders@1", files={"config.json": b"{}"}, agent=rekindle.store("a"))
    return tensors


@pytest.fixture
def attached(rekindle, published):
    with rk.attach("senders", 1, device="double:0", bucket_bytes=1 << 20,
                   agent=rekindle.store("a")) as session:
        yield session


@pytest.fixture
def sockets():
    with channel.private_directory() as path:
        yield path


@pytest.mark.parametrize("buffer_bytes", [1 << 30, 1 << 18])
def test_every_tensor_arrives_exactly_once(attached, published, sockets, buffer_bytes):
    address = f"ipc://{sockets}/0.sock"
    worker = Receiver(address)
    nbytes = ce.send(attached, address, "double:0", buffer_bytes=buffer_bytes)
    assert nbytes == sum(tensor.nbytes for tensor in published.values())
    [report] = worker.report()
    assert report["tensors"] == expected(published)
    assert report["twice"] == [] and report["hook"] == 1
    assert (report["buckets"] > 1) == (buffer_bytes < nbytes)
    assert os.listdir(sockets) == []
    attached.commit(timeout=PATIENCE_S)  # it has handed out all


def test_one_half_is_enough(attached, published, sockets, monkeypatch):
    """As on a device where two do not fit."""
    from rekindle.compat.checkpoint_engine import buffers
    allocate = buffers._allocate
    monkeypatch.setattr(buffers, "_allocate", lambda device, halves, size: (
        allocate(device, 1, size) if halves == 1 else None))
    worker = Receiver(f"ipc://{sockets}/0.sock")
    ce.send(attached, f"{sockets}/0.sock", "double:0")
    assert worker.report()[0]["tensors"] == expected(published)

    monkeypatch.setattr(buffers, "_allocate", lambda *_: None)
    with pytest.raises(rk.ExhaustedError, match="largest tensor"):
        buffers.make_buffer("double:0", 256, 256)


@pytest.mark.parametrize("at", [0, 2])
def test_a_receivers_error_is_raised_here_and_ends_it(attached, sockets, at):
    address = f"ipc://{sockets}/0.sock"
    worker = Receiver(address, "--fault", "error", "--at", at)
    with pytest.raises(ce.ReceiverError, match="no parameter of this name") as caught:
        ce.send(attached, address, "double:0", buffer_bytes=1 << 18)
    assert "Traceback" in caught.value.text
    assert worker.report()["error"].startswith("RuntimeError: the sender failed: the receiver")
    assert worker.exit_code() == 1


def test_a_receiver_that_cannot_open_the_buffer(attached, sockets):
    address = f"ipc://{sockets}/0.sock"
    worker = Receiver(address, "--fault", "handle")
    with pytest.raises(ce.ReceiverError, match="AssertionError"):
        ce.send(attached, address, "double:0")
    assert worker.report()["error"].startswith("AssertionError")


def test_a_receiver_whose_hook_fails(attached, sockets):
    address = f"ipc://{sockets}/0.sock"
    worker = Receiver(address, "--fault", "hook")
    with pytest.raises(ce.ReceiverLostError, match="is gone"):
        ce.send(attached, address, "double:0")
    assert worker.report()["error"] == "ValueError: the hook fails"


def test_a_receiver_of_before_0_4(attached, published, sockets):
    """It ends where others have their post-processing before them: who asked the engine knows."""
    worker = Receiver(f"ipc://{sockets}/0.sock", "--old")
    with pytest.raises(ce.ReceiverEndedError, match="has taken all weights") as caught:
        ce.send(attached, f"{sockets}/0.sock", "double:0")
    assert caught.value.nbytes == sum(tensor.nbytes for tensor in published.values())
    [report] = worker.report()
    assert report["tensors"] == expected(published) and report["hook"] == 1


def test_a_receiver_that_dies(attached, sockets):
    """Known at once: the time-out is longer than the test's patience."""
    address = f"ipc://{sockets}/0.sock"
    worker = Receiver(address, "--fault", "kill", "--at", 1)
    with pytest.raises(ce.ReceiverLostError):
        ce.send(attached, address, "double:0", buffer_bytes=1 << 18, timeout=10 * PATIENCE_S)
    assert worker.exit_code() == -signal.SIGKILL


def test_a_receiver_that_hangs_is_told_when_it_wakes(attached, sockets):
    address = f"ipc://{sockets}/0.sock"
    worker = Receiver(address, "--fault", "stop", "--at", 1)
    try:
        with channel.Channel(address) as open_channel:
            open_channel.wait_for_receiver(PATIENCE_S)
            from rekindle.compat.checkpoint_engine import buffers, sender
            buffer = buffers.make_buffer("double:0", *sender.sizes(attached.tensors()), 1 << 18)
            with pytest.raises(rk.TimeoutError, match="does not answer"):
                sender.transfer(open_channel, buffer, attached.buckets(), timeout=5)
    finally:
        os.kill(worker.process.pid, signal.SIGCONT)
    assert "the sender failed" in worker.report()["error"]


def test_no_receiver(attached, sockets):
    with pytest.raises(rk.TimeoutError, match="no receiver connected"):
        ce.send(attached, f"{sockets}/0.sock", "double:0", timeout=0.3)


class FailingSession:
    """The session of another, which fails after some tensors."""

    def __init__(self, session, good):
        self.session, self.good, self.tensors = session, good, session.tensors

    def buckets(self, timeout=None):
        for index, entry in enumerate(self.session):
            if index == self.good:
                raise rk.CorruptError("bytes do not match")
            yield [entry]


@pytest.mark.parametrize("good", [0, 40])
def test_a_session_that_fails_ends_the_receiver(attached, sockets, good):
    address = f"ipc://{sockets}/0.sock"
    worker = Receiver(address)
    with pytest.raises(rk.CorruptError):
        ce.send(FailingSession(attached, good), address, "double:0", buffer_bytes=1 << 18)
    assert worker.report()["error"] == "RuntimeError: the sender failed: bytes do not match"


def test_addresses_that_others_could_reach_are_refused(attached, sockets):
    for address in ("ipc://@checkpoint-engine-GPU-1-0.sock", "@name", "tcp://127.0.0.1:5555"):
        with pytest.raises(rk.InvalidError, match="no socket file"):
            ce.send(attached, address, "double:0")
    os.chmod(sockets, 0o750)
    with pytest.raises(rk.InvalidError, match="0700"):
        ce.send(attached, f"{sockets}/0.sock", "double:0")
    os.chmod(sockets, 0o700)
    with pytest.raises(rk.InvalidError, match="No such file"):
        ce.send(attached, f"{sockets}/none/0.sock", "double:0")
    with pytest.raises(rk.InvalidError, match="longer than"):
        ce.send(attached, f"{sockets}/{'x' * 100}", "double:0")


def test_a_part_of_a_tensor_is_refused(rekindle, published, sockets):
    with rk.attach("senders", 1, device="double:0", agent=rekindle.store("a"),
                   shard=[rk.Box("large", (0, 0), (1, 1 << 18))]) as session:
        with pytest.raises(rk.InvalidError, match="a part of 'large' only"):
            ce.send(session, f"{sockets}/0.sock", "double:0")


def test_two_receivers_at_one_socket_are_an_error(attached, sockets):
    address = f"ipc://{sockets}/0.sock"
    with channel.Channel(address) as open_channel:
        workers = [Receiver(address), Receiver(address)]
        try:
            eventually(lambda: open_channel._take_events() or open_channel.accepted == 2)
            with pytest.raises(rk.InvalidError, match="two receivers"):
                open_channel.answer(PATIENCE_S)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.exit_code()
