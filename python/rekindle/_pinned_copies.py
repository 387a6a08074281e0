"""Copies tensors of GPUs to host memory that is not pinned.

A GPU copies to such memory at a fraction of its link's rate. Therefore the bytes go through a ring
of pinned blocks: side streams copy into the blocks, and threads copy from the blocks to their
places. Many small tensors share a block. They are joined on the GPU first, so that it copies the
block at once.

The other way is to pin the places (cudaHostRegister). The agent takes a segment over only when no
process can write to it, so a trainer would have to pin and unpin the segments of every publication.
With 4 KiB pages that takes several times as long as the copy, with huge pages longer than the copy,
too. docs/reference/performance.md has the figures, also for the constants below.
"""
from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable
from typing import Any

from ._copy_threads import Copy, CopyThreads
from ._optional import module

# Bytes. The time that Python spends on each block shows with smaller ones.
BLOCK = 16 << 20
# Of a ring (128 MiB). Threads read a block from the CPU's last cache, which a larger ring exceeds.
BLOCKS = 8
# Blocks in the queues of the devices.
IN_FLIGHT = 2
# Of each device.
STREAMS = 2


class PinnedCopies:
    """Copies tensors of GPUs through a ring of pinned blocks. For one thread."""

    def __init__(self, torch: Any, threads: CopyThreads, streaming: bool) -> None:
        """Like HostCopies. RuntimeError: the host cannot pin the ring."""
        self._torch, self._threads, self._streaming = torch, threads, streaming
        # torch joins bytes one by one, these faster.
        self._joinable = {torch.bfloat16, torch.float16, torch.float32}
        self._ring = _Ring.take(torch)
        # The one that was used the longest time ago is the first.
        self._free = collections.deque(self._ring.blocks)
        self._open: _Batch | None = None
        self._queued: collections.deque[_Batch] = collections.deque()
        # The caller's streams, of each device.
        self._callers: dict[Any, Any] = {}
        # Devices whose side streams wait for the caller's stream.
        self._ordered: set[Any] = set()
        self._turn = 0

    def add(self, tensor: Any, target: int) -> None:
        """Begins to copy a tensor that has elements. It is cut into parts that fit into a block. A
        part that is not contiguous becomes so on the GPU, which needs memory of its size."""
        if tensor.is_contiguous():
            batch, nbytes = self._open, tensor.nbytes
            if (batch is not None and not self._streaming and batch.used + nbytes <= BLOCK
                    and batch.device == tensor.device):
                batch.add(tensor.view(-1), target, nbytes)
            else:
                self._add_flat(tensor.view(-1), target)
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
        at, count, itemsize = 0, flat.numel(), flat.itemsize
        while at < count:
            batch = self._batch(flat.device, itemsize)
            part = min(count - at, (BLOCK - batch.used) // itemsize)
            batch.add(flat if part == count else flat[at:at + part], target + at * itemsize,
                      part * itemsize)
            at += part

    def _batch(self, device: Any, room: int) -> "_Batch":
        """Returns the open batch, with at least `room` bytes left."""
        batch = self._open
        if batch is not None:
            if batch.used + room <= BLOCK and batch.device == device and (
                    not self._streaming
                    or batch.stream == self._torch.cuda.current_stream(device)):
                return batch
            self._queue_batch()
        stream = self._callers.get(device) if not self._streaming else None
        if stream is None:
            stream = self._callers[device] = self._torch.cuda.current_stream(device)
        batch = _Batch(self._block(), device, stream)
        self._open = batch
        return batch

    def _block(self) -> "_Block":
        while self._queued and (len(self._queued) >= IN_FLIGHT or not self._free):
            self._hand_over()
        block = self._free.popleft()
        self._threads.wait(block.number)
        return block

    def _queue_batch(self) -> None:
        """Queues the copies of the open batch on a side stream."""
        batch, self._open = self._open, None
        if batch is None:
            return
        # First, so that its tensors live until close() has waited for the copies.
        self._queued.append(batch)
        torch, memory = self._torch, batch.block.memory[:batch.used]
        with torch.cuda.stream(self._side_stream(batch)):
            flat = [one if one.dim() == 1 and one.is_contiguous() else one.contiguous().reshape(-1)
                    for one in batch.sources]
            joined = self._ring.staging(batch.device, self._turn) if len(flat) > 1 else None
            if joined is not None:
                joined = joined[:batch.used]
                dtype = flat[0].dtype
                if dtype not in self._joinable or any(one.dtype != dtype for one in flat):
                    dtype, flat = torch.uint8, [one.view(torch.uint8) for one in flat]
                torch.cat(flat, out=joined.view(dtype))
                flat = [joined]
            for place, source in zip(memory.split([one.nbytes for one in flat]), flat):
                place.copy_(source.view(torch.uint8), non_blocking=True)
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
        block = batch.block
        block.number = self._threads.put([Copy(target, block.address + at, size)
                                          for target, at, size in batch.pieces])
        self._free.append(block)


class _Batch:
    """What one block holds."""

    def __init__(self, block: "_Block", device: Any, stream: Any) -> None:
        self.block, self.device, self.stream = block, device, stream
        self.used = 0
        # One after the other. They live until their copies have ended.
        self.sources: list[Any] = []
        # (target, offset, bytes). Neighbours are one.
        self.pieces: list[tuple[int, int, int]] = []
        # The event after the copies.
        self.landed: Any = None

    def add(self, source: Any, target: int, nbytes: int) -> None:
        self.sources.append(source)
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
        # Of the last copy from it, in the PinnedCopies that has the ring.
        self.number = 0
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
        self._staging: dict[tuple[Any, int], Any] = {}

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
        for block in self.blocks:
            block.number = 0
        with _lock:
            if not _kept:
                _kept.append(self)

    def streams(self, device: Any) -> list[Any]:
        if device not in self._streams:
            self._streams[device] = [self._torch.cuda.Stream(device) for _ in range(STREAMS)]
        return self._streams[device]

    def staging(self, device: Any, stream: int) -> Any:
        """Returns a block on the device, for the current stream, which is this one of streams().
        None: the device has no memory left."""
        if (device, stream) not in self._staging:
            try:
                self._staging[device, stream] = self._torch.empty(
                    BLOCK, dtype=self._torch.uint8, device=device)
            except RuntimeError:
                return None
        return self._staging[device, stream]


_lock = threading.Lock()
_kept: list[_Ring] = []
# Rings of a parent process. CUDA does not work in a child, so the child never frees them.
_of_parent: list[_Ring] = []


def release_pinned() -> None:
    """Frees the memory that is kept for the next publication: 128 MiB that are pinned, and 32 MiB on
    each GPU."""
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
