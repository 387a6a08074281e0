"""Takes buckets while Python looks for the targets of tens of thousands of tensors."""
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
# Python finds a tensor's target within 2 us. A link of 64 GB/s brings this many bytes meanwhile.
_BYTES_A_TENSOR = 128 << 10
_MOST_BYTES = 4 << 30
# The thread stops at once, unless a device hangs.
_STOP_S = 10.0
_LOOK_S = 0.02


class Prefetch:
    """A context for finding the targets of a session on a device. Takes buckets until stop()."""

    def __init__(self, native: "Native", tensors: int) -> None:
        self._native = native
        self._bytes = min(tensors * _BYTES_A_TENSOR, _MOST_BYTES)
        self._thread: threading.Thread | None = None
        if tensors >= _FEWEST:
            self._thread = threading.Thread(target=self._run, name="rekindle-prefetch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        # The load itself raises the error.
        with contextlib.suppress(Error):
            self._native.call("rk_prefetch", self._bytes, milliseconds(SLICE_S))

    def stop(self) -> None:
        """Stops taking buckets. The load gets all that were taken. A second call does nothing. If a
        hanging device keeps the thread, the thread is left, and the load that follows times out."""
        thread, self._thread = self._thread, None
        deadline = time.monotonic() + _STOP_S
        # Repeats, because the thread may not have made its call yet.
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(Error):
                self._native.call("rk_prefetch", 0, milliseconds(_STOP_S))
            thread.join(_LOOK_S)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()
