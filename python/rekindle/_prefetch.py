"""Buckets that are taken while Python finds out where tens of thousands of tensors go."""
from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from ._native import SLICE_S, milliseconds
from .errors import Error

if TYPE_CHECKING:
    from ._native import Native

# With fewer tensors, the targets are found before a few buckets are filled.
_FEWEST = 2048
# A tensor's target is found in 2 us at most, in which a link of 64 GB/s brings as much.
_BYTES_A_TENSOR = 128 << 10
_MOST_BYTES = 4 << 30
# The thread stops at once, unless a device hangs.
_STOP_S = 10.0
_LOOK_S = 0.02


class Prefetch:
    """Around what finds the targets of a session on a device, up to stop()."""

    def __init__(self, native: "Native", tensors: int) -> None:
        self._native = native
        self._bytes = min(tensors * _BYTES_A_TENSOR, _MOST_BYTES)
        self._thread: threading.Thread | None = None
        if tensors >= _FEWEST:
            self._thread = threading.Thread(target=self._run, name="rekindle-prefetch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Error):  # who loads is told
            self._native.call("rk_prefetch", self._bytes, milliseconds(SLICE_S))

    def stop(self) -> None:
        """Nothing that it has taken is lost. Again: nothing. A thread that a hanging device keeps is
        left: the load that follows runs out of its time."""
        thread, self._thread = self._thread, None
        deadline = time.monotonic() + _STOP_S
        # More than once: it may not have called yet.
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(Error):
                self._native.call("rk_prefetch", 0, milliseconds(_STOP_S))
            thread.join(_LOOK_S)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()
