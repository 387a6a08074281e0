"""Gives LLM inference workers their weights: the package for workers and trainers.

    with rekindle.attach("qwen3", shard="tp=3/8", device="cuda") as session:
        session.load_into(model)
        session.commit()

Errors are `rekindle.Error` and its subclasses, one for each code of librekindle. Importing this
needs neither torch nor numpy. Tensors are torch tensors where torch is installed, otherwise numpy
arrays.
"""
from __future__ import annotations

from . import _library
from .boxes import Box, TensorInfo
from .catalog import Catalog, catalog
from .command import pull, status
from .errors import (
    CorruptError, DeniedError, Error, ExhaustedError, InternalError, InvalidError, NotFoundError,
    PeerLostError, StaleError, TimeoutError, UnavailableError)
from .publication import Published, publish
from .session import Session, attach
from .updating import UpdateResult, update

__version__ = _library.version()
__all__ = [
    "Box", "Catalog", "CorruptError", "DeniedError", "Error", "ExhaustedError", "InternalError",
    "InvalidError", "NotFoundError", "PeerLostError", "Published", "Session", "StaleError",
    "TensorInfo", "TimeoutError", "UnavailableError", "UpdateResult", "attach", "catalog",
    "publish", "pull", "status", "update"]
