"""Copies tensors from any device to host memory: a trainer's weights into segments of the store.

Only threads of this process write to the segments, never a device. Each thread holds the mapping as
long as it copies. So nothing can write to memory that is unmapped, also after Ctrl-C.
"""
from __future__ import annotations

import contextlib
import ctypes
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._copy_threads import CopyThreads, Hold, Piece
from ._optional import module
from ._pinned_copies import PinnedCopies
from .errors import InvalidError

if TYPE_CHECKING:
    Place = ctypes.Array[ctypes.c_char]

# Bytes of host memory that the caller's thread copies itself.
AT_ONCE = 1 << 20
# Bytes of host memory that a thread copies at a time.
PART = 8 << 20


class HostCopies:
    """Copies tensors of torch, numpy arrays and memoryviews into host memory. For one thread.

        with HostCopies() as copies:
            copies.add(tensor, place)
            copies.finish()

    All bytes are there when finish() has returned. At the end of the context nothing writes to any
    place, also after an exception.

    A copy of a GPU's tensor begins after the work that the current stream of its device has at
    add(). No stream of the caller waits for a copy. Until finish() returns, the caller must not
    write to a tensor; it may drop the tensor."""

    def __init__(self, hold: Hold = contextlib.nullcontext, *, streaming: bool = True) -> None:
        """`hold`: a context in which the places stay mapped. Threads copy inside of it.
        `streaming`: False if all tensors are ready with the work that the current stream of their
        device has at the first add(). Later work on that stream then delays no copy."""
        self._torch = module("torch")
        self._threads = CopyThreads(hold)
        self._streaming = streaming
        self._pinned: PinnedCopies | None = None
        self._cannot_pin = False

    def add(self, tensor: Any, place: "Place") -> None:
        """Begins to copy the elements of `tensor`, row-major, to `place`. InvalidError: `place` has
        another size."""
        self._threads.check()
        if self._torch is not None and isinstance(tensor, self._torch.Tensor):
            tensor = tensor.detach()
            _check_size(tensor, place)
            if len(place):
                self._add_torch(tensor, place)
        elif isinstance(tensor, memoryview):
            _check_size(tensor, place)
            ctypes.memmove(place, tensor.tobytes(), len(place))
        else:
            self._add_array(tensor, place)

    def finish(self) -> None:
        """Returns when all bytes are there. Raises the first error of a copy."""
        if self._pinned is not None:
            self._pinned.flush()
        self._threads.finish()
        self._threads.check()

    def close(self) -> None:
        """Gives up what is not copied, and waits until nothing writes to any place."""
        self._threads.stop()
        self._threads.finish()
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()

    def __enter__(self) -> "HostCopies":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # Ends the threads if an interrupt came before close() could.
        self._threads.stop()

    def _add_torch(self, tensor: Any, place: "Place") -> None:
        if not tensor.is_neg():  # Else the elements are not those in memory.
            if tensor.is_cuda and self._can_pin():
                assert self._pinned is not None
                self._pinned.add(tensor, ctypes.addressof(place))
                return
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                self._add_contiguous(tensor.data_ptr(), place, tensor)
                return
        flat = self._torch.frombuffer(place, dtype=tensor.dtype)
        flat.view(tensor.shape).copy_(tensor)

    def _can_pin(self) -> bool:
        if self._pinned is None and not self._cannot_pin:
            try:
                self._pinned = PinnedCopies(self._torch, self._threads, self._streaming)
            except RuntimeError:
                self._cannot_pin = True
        return self._pinned is not None

    def _add_array(self, array: Any, place: "Place") -> None:
        import numpy
        array = numpy.asarray(array)
        _check_size(array, place)
        # The byte order is normalised because the dtype's name does not show it: ">f4" becomes
        # "<f4".
        native = array.dtype.newbyteorder("=")
        if not len(place):
            return
        if array.flags.c_contiguous and array.dtype == native:
            self._add_contiguous(array.ctypes.data, place, array)
        else:
            numpy.frombuffer(memoryview(place), native).reshape(array.shape)[...] = array

    def _add_contiguous(self, source: int, place: "Place", keep: object) -> None:
        """Copies host memory that `keep` owns."""
        nbytes, target = len(place), ctypes.addressof(place)
        if nbytes <= AT_ONCE:
            ctypes.memmove(target, source, nbytes)
            return
        for at in range(0, nbytes, PART):
            self._threads.put([Piece(target + at, source + at, min(PART, nbytes - at))], keep)


def _check_size(tensor: Any, place: "Place") -> None:
    if tensor.nbytes != len(place):
        raise InvalidError(f"a tensor of {tensor.nbytes} bytes does not fit its place of "
                           f"{len(place)}")
