"""Lists the tensors and files of a version, to choose what to attach to."""
from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from . import _abi, _attaching, _files
from ._attaching import Request, attach_native
from ._native import Native
from ._listing import InfoReader
from .boxes import Box, TensorInfo
from .errors import InvalidError

# The smallest part of a version: a host that lacks the version fetches only this.
_SMALLEST = (Box(""),)


class Catalog(NamedTuple):
    model: str
    version: int
    tensors: list[TensorInfo]  # whole, sorted by name
    # Files that were published with the tensors, such as "config.json".
    file_names: list[str]
    agent: str | os.PathLike[str] | None

    def files(self) -> dict[str, bytes]:
        """Returns the contents of the files. Raises what `catalog` raises."""
        names = [_abi.FILE_PREFIX + name for name in self.file_names]
        return _files.read(self.agent, f"{self.model}@{self.version}", names)


def catalog(model: str | None = None, version: str | int | None = "latest", *,
            fallback_dir: str | os.PathLike[str] | None = None,
            agent: str | os.PathLike[str] | None = None, timeout: float | None = 10.0) -> Catalog:
    """Returns the catalog of a version. The caller does not join an instance: of the environment
    that `rekindle run` sets, it uses only the model and the store. A host that lacks the version
    fetches its smallest tensor. Arguments and errors are those of `rekindle.attach`."""
    store = agent if agent is not None else _attaching.environment("STORE")
    model = model if model is not None else _attaching.environment("MODEL")
    if model is None:
        raise InvalidError("the catalog of which model? Name it")
    wanted = _attaching.model_version(model, version)
    native = Native(store, timeout)
    try:
        attach_native(native, Request(wanted, boxes=_SMALLEST, fallback_dir=fallback_dir), timeout)
        return _read(native, store)
    finally:
        native.end()


def _read(native: Native, store: str | os.PathLike[str] | None) -> Catalog:
    first, count = ctypes.c_void_p(), ctypes.c_size_t()
    info = _abi.SessionInfo(size=ctypes.sizeof(_abi.SessionInfo))
    with native.using():
        native.call("rk_info", ctypes.byref(info))
        native.call("rk_catalog", ctypes.byref(first), ctypes.byref(count))
        entries = [entry for entry, *_ in InfoReader().read(first.value or 0, count.value)]
        name = info.model.decode()
    files = [entry.name.removeprefix(_abi.FILE_PREFIX) for entry in entries
             if entry.name.startswith(_abi.FILE_PREFIX)]
    tensors = [entry for entry in entries if not entry.name.startswith(_abi.FILE_PREFIX)]
    return Catalog(name, info.version, tensors, files, store)
