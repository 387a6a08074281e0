"""A version during its publication: the announced tensors, and their memory in the store."""
from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _abi
from ._attaching import environment
from ._native import Native, milliseconds, run_interruptibly, text
from ._parts import Part
from ._views import memory

_MONTH_MS = 30 * 24 * 3600 * 1000


class Announced(NamedTuple):
    """The announcement of a tensor."""

    name: str
    dtype: str  # as in safetensors
    shape: tuple[int, ...]


class Place(NamedTuple):
    """A box of a part that this rank writes, and its writable, row-major memory in the store."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    memory: "ctypes.Array[ctypes.c_char]"


class _Open:
    """A publication that has begun: its connection to the agent, and its end.

    end() abandons a version that is not committed, and leaves nothing of it."""

    def __init__(self, agent: str | os.PathLike[str] | None, timeout: float) -> None:
        """`timeout`: seconds to reach the agent of the store `agent` (None: $REKINDLE_STORE)."""
        self._native = Native(agent if agent is not None else environment("STORE"), timeout,
                              "publication")

    def open_copies(self, function: str, *arguments: Any) -> None:
        """Calls rk_copies_open. Copies of its threads end before commit() and end() unmap their
        places. StaleError: the publication is over."""
        self._native.call(function, *arguments)

    def commit(self, timeout: float | None) -> None:
        """Makes the version ready.

        `timeout`: seconds for the agent to digest it; None: a month. DeniedError: the version
        exists with other bytes."""
        patience_ms = max(1, milliseconds(timeout, _MONTH_MS))
        run_interruptibly(lambda: self._native.call_last("rk_publish_commit", patience_ms),
                          self._native.cut)
        self.end()

    def end(self) -> None:
        """Ends the publication. A second call does nothing."""
        self._native.end()


class Publication(_Open):
    """The publication of whole tensors. The caller writes every tensor of `announced` before
    commit(), in one thread at a time."""

    def __init__(self, model_version: str, announced: Sequence[Announced],
                 agent: str | os.PathLike[str] | None, timeout: float) -> None:
        super().__init__(agent, timeout)
        try:
            self._native.open("rk_publish_begin", "rk_publish_abandon", text(model_version),
                              _specs(announced), len(announced))
        except BaseException:
            self._native.end()
            raise

    def place(self, index: int) -> "ctypes.Array[ctypes.c_char]":
        """Returns the writable, row-major memory of a tensor in the store. Valid until commit()."""
        address, nbytes = ctypes.c_void_p(), ctypes.c_uint64()
        self._native.call("rk_publish_data", index, ctypes.byref(address), ctypes.byref(nbytes))
        return memory(address.value or 0, nbytes.value)


class JointPublication(_Open):
    """One rank's part of a joint publication. The caller writes all places of all parts before
    commit(), in one thread at a time."""

    def __init__(self, model_version: str, rank: int, world: int, parts: Sequence[Part],
                 agent: str | os.PathLike[str] | None, connect: float,
                 timeout: float | None) -> None:
        """Waits for the other ranks, `timeout` seconds (None: a month)."""
        super().__init__(agent, connect)
        self._ranks = [len(part.shape) for part in parts]
        options = _abi.JointOptions(ctypes.sizeof(_abi.JointOptions), text(model_version), rank,
                                    world, max(1, milliseconds(timeout, _MONTH_MS)))
        array = _parts(parts)
        try:
            run_interruptibly(
                lambda: self._native.open("rk_publish_begin_joint", "rk_publish_abandon",
                                          ctypes.byref(options), array, len(parts)),
                self._native.cut)
        except BaseException:
            self._native.end()
            raise

    def places(self, index: int) -> list[Place]:
        """Returns what this rank writes of a part. Valid until commit(). It is less than the part
        if other ranks of this host have the same elements."""
        count = ctypes.c_size_t()
        self._native.call("rk_publish_pieces", index, None, 0, ctypes.byref(count))
        array = (_abi.Piece * count.value)()
        self._native.call("rk_publish_pieces", index, array, count, ctypes.byref(count))
        return [Place(tuple(piece.offset[:self._ranks[index]]), tuple(piece.extent[:self._ranks[index]]),
                      memory(piece.data or 0, piece.bytes))
                for piece in array]


def _parts(parts: Sequence[Part]) -> "ctypes.Array[_abi.PublishedPart]":
    array = (_abi.PublishedPart * len(parts))()
    specs = _specs([Announced(part.name, part.dtype, part.shape) for part in parts])
    for one, spec, part in zip(array, specs, parts):
        one.tensor = spec
        one.offset = (ctypes.c_uint64 * len(part.shape))(*part.offset)
        one.extent = (ctypes.c_uint64 * len(part.shape))(*part.extent)
    return array


def _specs(announced: Sequence[Announced]) -> "ctypes.Array[_abi.TensorSpec]":
    array = (_abi.TensorSpec * len(announced))()
    for spec, (name, dtype, shape) in zip(array, announced):
        spec.name, spec.dtype = text(name), text(dtype)
        spec.dimensions = len(shape)
        spec.shape = (ctypes.c_uint64 * len(shape))(*shape)
    return array
