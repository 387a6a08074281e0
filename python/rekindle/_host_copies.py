"""Copies tensors from any device to host memory: a trainer's weights into segments of the store.

Only threads of this process write to the segments, never a device. librekindle ends its threads
before it unmaps a segment, also after Ctrl-C.
"""
from __future__ import annotations

import ctypes
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._copy_threads import Copy, CopyThreads, Open
from ._optional import module
from ._pinned_copies import PinnedCopies
from .errors import InvalidError

if TYPE_CHECKING:
    Place = ctypes.Array[ctypes.c_char]

# Bytes of small tensors that go to the threads together.
TOGETHER = 8 << 20


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

    def __init__(self, open_copies: Open | None = None, *, streaming: bool = True) -> None:
        """`open_copies`: of the publication that has the places; None: they lie anywhere.
        `streaming`: False if all tensors are ready with the work that the current stream of their
        device has at the first add(). Later work on that stream then delays no copy."""
        self._torch = module("torch")
        self._threads = CopyThreads(open_copies)
        self._streaming = streaming
        self._pinned: PinnedCopies | None = None
        self._cannot_pin = False
        # For the next put(), with what owns their sources.
        self._together: list[Copy] = []
        self._owners: list[object] = []
        self._together_bytes = 0

    def add(self, tensor: Any, place: "Place") -> None:
        """Begins to copy the elements of `tensor`, row-major, to `place`. InvalidError: `place` has
        another size."""
        if self._torch is not None and isinstance(tensor, self._torch.Tensor):
            tensor = tensor.detach()
            _check_size(tensor, place)
            if len(place):
                self._add_torch(tensor, place)
        elif isinstance(tensor, memoryview):
            _check_size(tensor, place)
            ctypes.memmove(place, tensor.tobytes(), len(place))
            self._put(place, 0)
        else:
            self._add_array(tensor, place)

    def finish(self) -> None:
        """Returns when all bytes are there. Raises the first error of a copy."""
        self._put_together()
        if self._pinned is not None:
            self._pinned.flush()
        self._threads.finish()

    def close(self) -> None:
        """Gives up what is not copied, and waits until nothing writes to any place."""
        self._threads.close()
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()

    def __enter__(self) -> "HostCopies":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _add_torch(self, tensor: Any, place: "Place") -> None:
        if not tensor.is_neg():  # Else the elements are not those in memory.
            if tensor.is_cuda and self._can_pin():
                assert self._pinned is not None
                self._pinned.add(tensor, ctypes.addressof(place))
                return
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                self._put(place, tensor.data_ptr(), tensor)
                return
        flat = self._torch.frombuffer(place, dtype=tensor.dtype)
        flat.view(tensor.shape).copy_(tensor)
        self._put(place, 0)

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
            self._put(place, array.ctypes.data, array)
        else:
            numpy.frombuffer(memoryview(place), native).reshape(array.shape)[...] = array
            self._put(place, 0)

    def _put(self, place: "Place", source: int, owner: object = None) -> None:
        """Copies host memory that `owner` owns. 0: the bytes are there."""
        self._together.append(Copy(ctypes.addressof(place), source, len(place)))
        self._owners.append(owner)
        self._together_bytes += len(place)
        if self._together_bytes >= TOGETHER:
            self._put_together()

    def _put_together(self) -> None:
        copies, self._together = self._together, []
        owners, self._owners = self._owners, []
        self._together_bytes = 0
        if copies:
            self._threads.put(copies, owners)


def _check_size(tensor: Any, place: "Place") -> None:
    if tensor.nbytes != len(place):
        raise InvalidError(f"a tensor of {tensor.nbytes} bytes does not fit its place of "
                           f"{len(place)}")
