"""Reads the small files of a version, whatever the session that needs them does meanwhile."""
from __future__ import annotations

import ctypes
import os

from . import _abi
from ._attaching import Request, attach_native
from ._native import Native, wait_until
from ._views import InfoReader
from .boxes import Box

PATIENCE_S = 60.0


def read(store: str | os.PathLike[str] | None, model_version: str,
         names: list[str]) -> dict[str, bytes]:
    """Returns copies of the files, by name without the prefix. Uses a short session of its own."""
    if not names:
        return {}
    native = Native(store, PATIENCE_S)
    try:
        boxes = tuple(Box(name) for name in names)
        attach_native(native, Request(model_version, boxes=boxes), PATIENCE_S)
        found: dict[str, bytes] = {}
        while True:
            array, count = ctypes.c_void_p(), ctypes.c_size_t()
            wait_until(PATIENCE_S, lambda ms: native.call(
                "rk_next", ms, ctypes.byref(array), ctypes.byref(count)))
            if not count.value:
                return {name: found[name] for name in sorted(found)}
            for info, data, _, _ in InfoReader().read(array.value or 0, count.value):
                name = info.name.removeprefix(_abi.FILE_PREFIX)
                found[name] = ctypes.string_at(data, info.nbytes) if info.nbytes else b""
    finally:
        native.end()
