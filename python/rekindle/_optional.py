"""Packages that Rekindle uses where they are installed, and the garbage collector."""
from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from collections.abc import Iterator
from typing import Any


@functools.lru_cache(maxsize=None)
def module(name: str) -> Any:
    """torch or numpy, None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """While thousands of small objects are made that all stay: the collector would go through the
    whole heap again and again, which takes as long as making them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
