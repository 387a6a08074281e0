"""Optional packages and their versions, and a pause of the garbage collector."""
from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from collections.abc import Iterator
from typing import Any


@functools.lru_cache(maxsize=None)
def module(name: str) -> Any:
    """Returns a package, for example torch; None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def version(package: str) -> str | None:
    """Returns the version of an installed distribution; None where it is not installed."""
    # Its import takes several milliseconds, which an attach does not need.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Stops the garbage collector while a caller makes thousands of objects that all stay. The
    collector would scan the whole heap repeatedly, which takes as long as making them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
