"""A version during its publication: the announced tensors, and their memory in the store."""
from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from . import _abi
from ._attaching import environment
from ._native import Native, milliseconds, run_interruptibly, text
from ._views import memory

_MONTH_MS = 30 * 24 * 3600 * 1000


class Announced(NamedTuple):
    """The announcement of a tensor."""

    name: str
    dtype: str  # as in safetensors
    shape: tuple[int, ...]


class Publication:
    """A publication. The caller writes every tensor of `announced` before commit(), in one thread
    at a time.

    end() abandons a version that is not committed, and leaves nothing of it."""

    def __init__(self, model_version: str, announced: Sequence[Announced],
                 agent: str | os.PathLike[str] | None, timeout: float) -> None:
        """`timeout`: seconds to reach the agent of the store `agent` (None: $REKINDLE_STORE)."""
        self._native = Native(agent if agent is not None else environment("STORE"), timeout,
                              "publication")
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

    def using(self) -> AbstractContextManager[None]:
        """Returns a context in which places stay mapped: end() takes effect only after it.
        StaleError: the publication is over."""
        return self._native.using()

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


def _specs(announced: Sequence[Announced]) -> "ctypes.Array[_abi.TensorSpec]":
    array = (_abi.TensorSpec * len(announced))()
    for spec, (name, dtype, shape) in zip(array, announced):
        spec.name, spec.dtype = text(name), text(dtype)
        spec.dimensions = len(shape)
        spec.shape = (ctypes.c_uint64 * len(shape))(*shape)
    return array
