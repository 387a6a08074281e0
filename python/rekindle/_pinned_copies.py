"""Copies tensors of GPUs to host memory that is not pinned.

A GPU copies to such memory at a fraction of its link's rate. Therefore the bytes go through a ring
of pinned blocks: side streams copy into the blocks, and threads copy from the blocks to their
places. Many small tensors share a block.

The other way is to pin the places (cudaHostRegister). A trainer maps the segments of every
publication anew, so it would have to pin all of them each time. With 4 KiB pages that takes several
times as long as the copy, with huge pages longer than the copy, too. docs/reference/performance.md
has the figures, also for the constants below.
"""
from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ._copy_threads import MOST_THREADS, CopyThreads, Piece
from ._optional import module

# Bytes. The time that Python spends on each block shows with smaller ones.
BLOCK = 8 << 20
# Of a ring (136 MiB). Threads read a block from the CPU's last cache, which a larger ring exceeds.
BLOCKS = MOST_THREADS + 3
# Blocks in the queues of the devices.
IN_FLIGHT = 2
# Of each device.
STREAMS = 2


class PinnedCopies:
    """Copies tensors of GPUs through a ring of pinned blocks. For one thread."""

    def __init__(self, torch: Any, threads: CopyThreads, streaming: bool) -> None:
        """Like HostCopies. RuntimeError: the host cannot pin the ring."""
        self._torch, self._threads, self._streaming = torch, threads, streaming
        self._ring = _Ring.take(torch)
        self._free: queue.SimpleQueue[_Block] = queue.SimpleQueue()
        for block in self._ring.blocks:
            self._free.put(block)
        self._open: _Batch | None = None
        self._queued: collections.deque[_Batch] = collections.deque()
        # Devices whose side streams wait for the caller's stream.
        self._ordered: set[Any] = set()
        self._turn = 0

    def add(self, tensor: Any, target: int) -> None:
        """Begins to copy a tensor that has elements. It is cut into parts that fit into a block. A
        part that is not contiguous becomes so on the GPU, which needs memory of its size."""
        if tensor.is_contiguous():
            self._add_flat(tensor.reshape(-1).view(self._torch.uint8), target)
            return
        rows = tensor.shape[0]
        row = tensor.nbytes // rows
        if row > BLOCK:
            for i in range(rows):
                self.add(tensor[i], target + i * row)
            return
        step = BLOCK // row
        for i in range(0, rows, step):
            part = tensor[i:i + step]
            self._batch(tensor.device, part.nbytes).add(part, target + i * row, part.nbytes)

    def flush(self) -> None:
        """Gives all bytes to the threads. It waits until they are in pinned memory."""
        self._queue_batch()
        while self._queued:
            self._hand_over()

    def close(self) -> None:
        """Call it when the threads have ended."""
        self._open = None
        self._queued.clear()
        self._ring.give_back()

    def _add_flat(self, flat: Any, target: int) -> None:
        at, size = 0, flat.numel()
        while at < size:
            batch = self._batch(flat.device)
            part = min(size - at, BLOCK - batch.used)
            batch.add(flat if part == size else flat[at:at + part], target + at, part)
            at += part

    def _batch(self, device: Any, room: int = 1) -> "_Batch":
        """Returns the open batch, with at least `room` bytes left."""
        batch = self._open
        if batch is not None:
            if batch.used + room <= BLOCK and batch.device == device and (
                    not self._streaming
                    or batch.stream == self._torch.cuda.current_stream(device)):
                return batch
            self._queue_batch()
        batch = _Batch(self._block(), device, self._torch.cuda.current_stream(device))
        self._open = batch
        return batch

    def _block(self) -> "_Block":
        while self._queued and (len(self._queued) >= IN_FLIGHT or self._free.empty()):
            self._hand_over()
        self._threads.check()
        return self._free.get()

    def _queue_batch(self) -> None:
        """Queues the copies of the open batch on a side stream."""
        batch, self._open = self._open, None
        if batch is None:
            return
        # First, so that its tensors live until close() has waited for the copies.
        self._queued.append(batch)
        torch = self._torch
        with torch.cuda.stream(self._side_stream(batch)):
            places = batch.block.memory[:batch.used].split(batch.sizes)
            for place, source in zip(places, batch.sources):
                if source.dtype != torch.uint8 or source.dim() != 1:
                    source = source.contiguous().reshape(-1).view(torch.uint8)
                place.copy_(source, non_blocking=True)
            batch.landed = batch.block.record(torch, batch.device)

    def _side_stream(self, batch: "_Batch") -> Any:
        """Returns a stream that has waited for the caller's."""
        streams = self._ring.streams(batch.device)
        self._turn = (self._turn + 1) % len(streams)
        if self._streaming:
            streams[self._turn].wait_event(batch.stream.record_event())
        elif batch.device not in self._ordered:
            ready = batch.stream.record_event()
            for stream in streams:
                stream.wait_event(ready)
            self._ordered.add(batch.device)
        return streams[self._turn]

    def _hand_over(self) -> None:
        """Waits for the oldest batch, and gives it to the threads."""
        batch = self._queued[0]
        batch.landed.synchronize()
        self._queued.popleft()
        base = batch.block.address
        pieces = [Piece(target, base + at, size) for target, at, size in batch.pieces]
        self._threads.put(pieces, batch.block, partial(self._free.put, batch.block))


class _Batch:
    """What one block holds."""

    def __init__(self, block: "_Block", device: Any, stream: Any) -> None:
        self.block, self.device, self.stream = block, device, stream
        self.used = 0
        # One after the other. They live until their copies have ended.
        self.sources: list[Any] = []
        self.sizes: list[int] = []  # bytes
        # (target, offset, bytes). Neighbours are one.
        self.pieces: list[tuple[int, int, int]] = []
        # The event after the copies.
        self.landed: Any = None

    def add(self, source: Any, target: int, nbytes: int) -> None:
        self.sources.append(source)
        self.sizes.append(nbytes)
        last, at, size = self.pieces[-1] if self.pieces else (0, 0, 0)
        if last + size == target:
            self.pieces[-1] = (last, at, size + nbytes)
        else:
            self.pieces.append((target, self.used, nbytes))
        self.used += nbytes


class _Block:
    """Pinned memory, and an event after the copies into it."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.address = memory, memory.data_ptr()
        self._device: Any = None
        self._event: Any = None

    def record(self, torch: Any, device: Any) -> Any:
        """Records the event on the current stream. Waiting for it spins, which takes at most the
        time of a few blocks. Sleeping is slower by the time of each wake-up."""
        if self._device != device:
            self._device, self._event = device, torch.cuda.Event()
        self._event.record()
        return self._event


class _Ring:
    """Pinned blocks, and streams of each device. It serves one PinnedCopies at a time. One ring
    stays for the next."""

    def __init__(self, torch: Any) -> None:
        # One by one, because torch rounds an allocation up to a power of two.
        self.blocks = [_Block(torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=True))
                       for _ in range(BLOCKS)]
        self._torch = torch
        self._streams: dict[Any, list[Any]] = {}

    @classmethod
    def take(cls, torch: Any) -> "_Ring":
        with _lock:
            if _kept:
                return _kept.pop()
        return cls(torch)

    def give_back(self) -> None:
        """Waits until no device writes to it."""
        try:
            for streams in self._streams.values():
                for stream in streams:
                    stream.synchronize()
        except RuntimeError:
            return  # The device failed. Its next use says so.
        with _lock:
            if not _kept:
                _kept.append(self)

    def streams(self, device: Any) -> list[Any]:
        if device not in self._streams:
            self._streams[device] = [self._torch.cuda.Stream(device) for _ in range(STREAMS)]
        return self._streams[device]


_lock = threading.Lock()
_kept: list[_Ring] = []
# Rings of a parent process. CUDA does not work in a child, so the child never frees them.
_of_parent: list[_Ring] = []


def release_pinned() -> None:
    """Frees the pinned memory that is kept for the next publication (136 MiB)."""
    with _lock:
        _kept.clear()
    torch = module("torch")
    empty: Callable[[], None] | None = getattr(
        getattr(torch, "_C", None), "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _of_parent.extend(_kept)
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
