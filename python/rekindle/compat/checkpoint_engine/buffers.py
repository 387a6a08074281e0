"""The memory through which tensors go to an engine's worker.

torch can share only memory that it has allocated, and a receiver wants one buffer for a whole
update. So tensors are copied on the device, from Rekindle's buckets to a buffer of torch. The
buffer has two halves: one is filled while the worker reads the other.
"""
from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...errors import ExhaustedError, InvalidError

# The alignment of tensors in the buffer, equal to checkpoint-engine's.
ALIGNMENT = 256
DEFAULT_BYTES = 1 << 30  # of both halves of a buffer
# A buffer takes at most a fourth of the free memory, unless one tensor needs more.
_FREE_SHARE = 4

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def device_key(device: str | torch.device) -> str:
    """Returns the engines' name of a device: "GPU-6f2c…"; for a device double its own name."""
    if not is_cuda(device):
        return str(device)
    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid!s}"


def is_cuda(device: str | torch.device) -> bool:
    return str(device).startswith("cuda")


class Buffer(Protocol):
    """Shared memory of `halves` times `half_bytes` bytes; `tensor` views it as uint8."""

    tensor: torch.Tensor
    halves: int
    half_bytes: int

    def handle(self) -> Handle:
        """Returns a function and its arguments, to be pickled: a worker calls it for its own tensor
        of this memory.
        """

    def synchronize(self) -> None:
        """Waits until everything that was queued on the memory is visible to other processes."""

    def release(self) -> None:
        """Frees the memory, after the worker has. A second call does nothing."""


class CudaBuffer:
    def __init__(self, device: torch.device, halves: int, half_bytes: int) -> None:
        self.halves, self.half_bytes = halves, half_bytes
        self.tensor = torch.empty(halves * half_bytes, dtype=torch.uint8, device=device)
        self._device = self.tensor.device

    def handle(self) -> Handle:
        from torch.multiprocessing.reductions import reduce_tensor
        handle: Handle = reduce_tensor(self.tensor)
        return handle

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def release(self) -> None:
        if self.tensor.numel() == 0:
            return
        # No cycle of objects has the memory, so Python's collector is not needed.
        self.tensor = self.tensor.new_empty(0)
        with torch.cuda.device(self._device):
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class HostBuffer:
    """For device doubles. The receiver needs this package."""

    def __init__(self, halves: int, half_bytes: int) -> None:
        self.halves, self.half_bytes = halves, half_bytes
        self._descriptor = os.memfd_create("rekindle-buffer")
        os.ftruncate(self._descriptor, halves * half_bytes)
        self.tensor = torch.frombuffer(mmap.mmap(self._descriptor, halves * half_bytes),
                                       dtype=torch.uint8)

    def handle(self) -> Handle:
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        # Receivers replace the seventh argument by their device's index.
        return open_host_buffer, (path, self.tensor.numel(), None, None, None, None, None)

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        if self.tensor.numel():
            self.tensor = self.tensor.new_empty(0)
            os.close(self._descriptor)


def open_host_buffer(path: str, nbytes: int, *_: object) -> torch.Tensor:
    """Returns a uint8 tensor of shape [nbytes] on that memory. Runs in the receiver's process."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def make_buffer(device: str | torch.device, largest: int, total: int,
                wanted: int = DEFAULT_BYTES) -> Buffer:
    """Returns a buffer for tensors of `total` bytes, the largest of `largest` bytes; aligned sizes.

    It has `wanted` bytes, or less if `total` or a fourth of the device's free memory is less. A
    tensor goes over in one piece, so a half is never smaller than the largest. If two such halves
    do not fit, there is one, and filling and reading take turns.
    ExhaustedError: not even one fits.
    """
    if wanted < 2 * ALIGNMENT:
        raise InvalidError(f"a buffer of {wanted} bytes is too small")
    make = functools.partial(_allocate, device)
    if is_cuda(device):
        wanted = min(wanted, torch.cuda.mem_get_info(torch.device(device))[0] // _FREE_SHARE)
    least = max(aligned(largest), ALIGNMENT)
    half = max(min(wanted // 2 // ALIGNMENT * ALIGNMENT, aligned(total)), least)
    buffer = make(2, half) or make(1, least)
    if buffer is None:
        raise ExhaustedError(f"no {least} bytes on {device} for the largest tensor: give the "
                             f"engine less of the device's memory")
    return buffer


def _allocate(device: str | torch.device, halves: int, half_bytes: int) -> Buffer | None:
    if not is_cuda(device):
        return HostBuffer(halves, half_bytes)
    try:
        return CudaBuffer(torch.device(device), halves, half_bytes)
    except torch.OutOfMemoryError:
        return None
