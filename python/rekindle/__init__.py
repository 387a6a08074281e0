"""Gives LLM inference workers their weights: the package for workers and trainers.

    with rekindle.attach("qwen3", shard="tp=3/8", device="cuda") as session:
        session.load_into(model)
        session.commit()

Errors are `rekindle.Error` and its subclasses, one for each code of librekindle. Importing this
needs neither torch nor numpy. Tensors are torch tensors where torch is installed, otherwise numpy
arrays.

The import itself loads no other module. The first use of a name loads the module that defines it.
"""
from __future__ import annotations

import importlib

# Type checkers take any variable of this name for true. Importing `typing` takes milliseconds.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from . import standby as standby
    from .boxes import Box, TensorInfo
    from .cataloging import Catalog, catalog
    from .command import pull, status
    from .errors import (
        CorruptError, DeniedError, Error, ExhaustedError, InternalError, InvalidError,
        NotFoundError, PeerLostError, StaleError, TimeoutError, UnavailableError)
    from .joint import Publisher, publisher
    from .orders import Order
    from .publication import Published, publish
    from .session import Session, attach
    from .updating import UpdateResult, update

    __version__: str
else:
    def __getattr__(name: str) -> object:
        if name == "__version__":
            found = importlib.import_module("._library", __name__).version()
        elif name in _MODULE_OF:
            found = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
        elif name in _NAMES:
            return importlib.import_module(f".{name}", __name__)
        else:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_NAMES, "__version__"})

__all__ = [
    "Box", "Catalog", "CorruptError", "DeniedError", "Error", "ExhaustedError", "InternalError",
    "InvalidError", "NotFoundError", "Order", "PeerLostError", "Published", "Publisher", "Session",
    "StaleError", "TensorInfo", "TimeoutError", "UnavailableError", "UpdateResult", "attach", "catalog",
    "publish", "publisher", "pull", "status", "update"]

# The names that each module defines. No name equals that of a module: importing a module binds its
# name in this package.
_NAMES = {
    "boxes": ("Box", "TensorInfo"),
    "cataloging": ("Catalog", "catalog"),
    "command": ("pull", "status"),
    "errors": (
        "CorruptError", "DeniedError", "Error", "ExhaustedError", "InternalError", "InvalidError",
        "NotFoundError", "PeerLostError", "StaleError", "TimeoutError", "UnavailableError"),
    "joint": ("Publisher", "publisher"),
    "orders": ("Order",),
    "publication": ("Published", "publish"),
    "session": ("Session", "attach"),
    "standby": (),
    "updating": ("UpdateResult", "update"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
