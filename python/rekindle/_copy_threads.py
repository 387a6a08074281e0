"""Threads of librekindle that copy host memory, outside of Python's global lock."""
from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _abi
from ._native import SLICE_S, raise_error

# Bytes of sources that put() keeps alive. It waits for the oldest ones beyond that.
MOST_KEPT = 256 << 20

# Calls rk_copies_open(publication, …) with these further arguments.
Open = Callable[..., None]


class Copy(NamedTuple):
    """Bytes to copy, by addresses. Source 0: they are at their target already."""

    target: int
    source: int
    nbytes: int


class CopyThreads:
    """Copies in the background, in the order of the calls. For one thread."""

    def __init__(self, open_copies: Open | None = None) -> None:
        """`open_copies`: of the publication that has the targets; None: any memory."""
        self._abi = _abi.load()
        self._handle = ctypes.c_void_p()
        if open_copies is None:
            self._call("rk_copies_open", None, 0, ctypes.byref(self._handle))
        else:
            open_copies("rk_copies_open", 0, ctypes.byref(self._handle))
        self._last = ctypes.c_uint64()
        self._kept: collections.deque[tuple[int, int, object]] = collections.deque()
        self._kept_bytes = 0

    def put(self, copies: list[Copy], keep: object = None) -> int:
        """Begins to copy, and returns a number for wait(). `keep` owns the sources."""
        array = bytearray(_abi.COPY.size * len(copies))
        for index, copy in enumerate(copies):
            _abi.COPY.pack_into(array, index * _abi.COPY.size, *copy)
        pointer = (ctypes.c_char * len(array)).from_buffer(array)
        self._call("rk_copies_put", self._handle, pointer, len(copies), ctypes.byref(self._last))
        if keep is not None:
            nbytes = sum(copy.nbytes for copy in copies)
            self._kept.append((self._last.value, nbytes, keep))
            self._kept_bytes += nbytes
            while self._kept_bytes > MOST_KEPT:
                self.wait(self._kept[0][0])
        return self._last.value

    def wait(self, number: int) -> None:
        """Returns when all copies up to `number` are done."""
        error = _abi.Error()
        code = _abi.TIMEOUT
        while code == _abi.TIMEOUT:  # So that Ctrl-C has an effect.
            code = self._abi.rk_copies_wait(self._handle, number, int(SLICE_S * 1000),
                                            ctypes.byref(error))
        raise_error(code, error)
        while self._kept and self._kept[0][0] <= number:
            self._kept_bytes -= self._kept.popleft()[1]

    def finish(self) -> None:
        """Returns when all copies are done."""
        if self._last.value:
            self.wait(self._last.value)

    def close(self) -> None:
        """Drops copies that have not begun. Afterwards nothing writes to any target."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        self._abi.rk_copies_close(handle)
        self._kept.clear()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def _call(self, function: str, *arguments: Any) -> None:
        error = _abi.Error()
        raise_error(getattr(self._abi, function)(*arguments, ctypes.byref(error)), error)
