"""Sends the tensors of sessions to one worker, by checkpoint-engine's protocol.

    handle of the buffer              → ""
    [{name, dtype, shape, offset}] …  → "" each time, when the worker has read them
    None                              → "": the worker has released the buffer
    None                              → "": the worker has run its post-processing

Before checkpoint-engine 0.4, a worker runs its post-processing at the first None, answers, and
ends. An answer that is not empty is an error. An exception instead of a message makes the worker
give up.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...boxes import TensorInfo
from ...errors import InvalidError
from .buffers import ALIGNMENT, DEFAULT_BYTES, Buffer, aligned, make_buffer
from .channel import Channel, ReceiverEndedError, ReceiverLostError

Entry = tuple[str, torch.Tensor]
# Seconds. The post-processing of a worker may take long.
ANSWER_TIMEOUT = 300.0


def send(session: Any, zmq_path: str, device: str | torch.device, *,
         buffer_bytes: int = DEFAULT_BYTES, timeout: float = ANSWER_TIMEOUT) -> int:
    """Sends all tensors of `session` to one worker, and returns the number of bytes.

    session: of whole tensors, attached with `device`.
    zmq_path: the socket file to make, "ipc:///DIRECTORY/NAME" or a path, in a directory of mode
        0700 of this user. The caller tells the engine of it, as `zmq_handles[device_key]`, before
        this call or during it.
    device: "cuda:1", a torch.device; or "double:0".
    buffer_bytes: of the buffer on the device; see docs/guides/checkpoint-engine.md.
    timeout: seconds for the worker to connect, for each of its answers, and for a bucket to come.

    ReceiverError: the worker reports an error. ReceiverLostError: it died. ReceiverEndedError: it
    took everything, and then died or is an old one. TimeoutError: it did not connect or answer.
    Also raises what the session raises. In each case, a worker that still exists is told to give
    up. The engine's weights may then be of two versions.
    """
    with Channel(zmq_path) as channel:
        buffer = make_buffer(device, *sizes(session.tensors()), buffer_bytes)
        channel.wait_for_receiver(timeout)
        return transfer(channel, buffer, session.buckets(timeout), timeout=timeout)


def sizes(tensors: Iterable[TensorInfo]) -> tuple[int, int]:
    """Returns the bytes of the largest tensor and of all tensors, aligned as in the buffer.

    InvalidError: some are parts of tensors. Engines cut whole tensors by themselves.
    """
    largest = total = 0
    for info in tensors:
        if tuple(info.shape) != tuple(info.full_shape):
            raise InvalidError(f"the session has a part of '{info.name}' only: attach without a "
                               f"shard, engines cut tensors up by themselves")
        nbytes = aligned(info.nbytes)
        largest, total = max(largest, nbytes), total + nbytes
    return largest, total


def transfer(channel: Channel, buffer: Buffer, buckets: Iterable[Sequence[Entry]], *,
             timeout: float = ANSWER_TIMEOUT, copied: Callable[[], None] = lambda: None) -> int:
    """Sends all tensors over a connected channel, and returns their bytes. Releases the buffer.

    copied: called when the worker has read all tensors. If it raises, the worker can still be told.
    Errors are those of `send`. The worker has been told of them.
    """
    turn, taken = _Turn(channel, buffer, timeout), False
    try:
        turn.tell(buffer.handle())
        turn.fill(buckets)
        turn.take_answer()
        copied()
        turn.tell(None)
        turn.take_answer()
        buffer.release()
        taken = True
        turn.tell(None)
        turn.take_answer()
        return turn.nbytes
    except BaseException as error:
        if taken and isinstance(error, ReceiverLostError):
            raise ReceiverEndedError(f"{error}: it has taken all weights, but has not said that it "
                                     f"is done with them", turn.nbytes) from error
        channel.abort(error)
        raise
    finally:
        buffer.release()


class Run:
    """Tensors side by side in one piece of memory: one copy moves all of them."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.begin = self.end = tensor.data_ptr()
        self.items: list[tuple[str, torch.Tensor, int]] = []
        self._base = self.storage.data_ptr()
        self.append(name, tensor)

    def append(self, name: str, tensor: torch.Tensor) -> None:
        self.items.append((name, tensor, tensor.data_ptr() - self.begin))
        self.end = tensor.data_ptr() + tensor.nbytes

    def takes(self, tensor: torch.Tensor, limit: int) -> bool:
        at = tensor.data_ptr()
        return (0 <= at - self.end < ALIGNMENT and (at - self.begin) % ALIGNMENT == 0
                and at + tensor.nbytes - self.begin <= limit
                and tensor.untyped_storage().data_ptr() == self._base)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def bytes(self) -> torch.Tensor:
        """Returns a uint8 tensor of shape [nbytes] on the tensors' memory."""
        view = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        view.set_(self.storage, self.begin - self._base, (self.nbytes,), (1,))
        return view


def runs(entries: Iterable[Entry], limit: int) -> Iterator[Run]:
    """Yields runs of tensors that lie side by side, each up to `limit` bytes."""
    run: Run | None = None
    for name, tensor in entries:
        tensor = tensor.contiguous()
        if run is not None and run.takes(tensor, limit):
            run.append(name, tensor)
            continue
        if run is not None:
            yield run
        run = Run(name, tensor)
    if run is not None:
        yield run


class _Turn:
    """Fills one half while the worker reads the other. At most one message has no answer yet."""

    def __init__(self, channel: Channel, buffer: Buffer, timeout: float) -> None:
        self.nbytes = 0
        self._channel, self._buffer, self._timeout = channel, buffer, timeout
        self._outstanding = False
        self._half = self._used = 0
        self._items: list[dict[str, Any]] = []

    def tell(self, message: object) -> None:
        """Sends a message, after the answer to the message before."""
        self.take_answer()
        self._channel.tell(message, self._timeout)
        self._outstanding = True

    def take_answer(self) -> None:
        if self._outstanding:
            self._channel.answer(self._timeout)
            self._outstanding = False

    def fill(self, buckets: Iterable[Sequence[Entry]]) -> None:
        for entries in buckets:
            for run in runs(entries, self._buffer.half_bytes):
                self.add(run)
        self.flush()

    def add(self, run: Run) -> None:
        if self._used + run.nbytes > self._buffer.half_bytes:
            self.flush()
        begin = self._half * self._buffer.half_bytes + self._used
        if run.nbytes:
            self._buffer.tensor[begin:begin + run.nbytes].copy_(run.bytes(), non_blocking=True)
        for name, tensor, offset in run.items:
            self._items.append({"name": name, "dtype": tensor.dtype, "shape": tensor.shape,
                                "offset": begin + offset})
            self.nbytes += tensor.nbytes
        self._used += aligned(run.nbytes)

    def flush(self) -> None:
        """Hands the filled half to the worker. On return, the worker has read the next half."""
        if not self._items:
            return
        self._buffer.synchronize()
        self.tell(self._items)
        self._items, self._used = [], 0
        self._half = (self._half + 1) % self._buffer.halves
        if self._buffer.halves == 1:
            self.take_answer()
