"""One exception for each error code of librekindle, named by what the caller does next.

Each is also the builtin exception that callers expect, so that ``except TimeoutError`` and ``except
ConnectionError`` work without this module.
"""
from __future__ import annotations

import builtins


class Error(Exception):
    """An error of Rekindle. ``str(error)`` is one line: what failed, on what, why, what to do."""

    code: int = 0  # of the C ABI, rk_code
    # The code's name in the JSON output of the command.
    name: str = "ERROR"


class InvalidError(Error, ValueError):
    """The input is wrong: fix it, do not retry."""

    code, name = 1, "INVALID"


class NotFoundError(Error, LookupError):
    """There is no such model, version or tensor, or no host holds it. The message names it."""

    code, name = 2, "NOT_FOUND"


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001 - it is one
    """The deadline has passed. The session goes on: call again."""

    code, name = 3, "TIMEOUT"


class PeerLostError(Error, ConnectionError):
    """The agent is gone: attach again, which waits until the agent has restarted."""

    code, name = 4, "PEER_LOST"


class StaleError(Error):
    """The session has ended: it was closed, its version was retired, its instance moved on, or a
    parent process opened it before fork()."""

    code, name = 5, "STALE"


class CorruptError(Error):
    """Bytes do not match their digest, and no host has better ones."""

    code, name = 6, "CORRUPT"


class ExhaustedError(Error):
    """Out of memory, space or descriptors."""

    code, name = 7, "EXHAUSTED"


class DeniedError(Error, PermissionError):
    """This user may not do it, or the version exists with other bytes."""

    code, name = 8, "DENIED"


class UnavailableError(Error):
    """Not possible now: try again with back-off."""

    code, name = 9, "UNAVAILABLE"


class InternalError(Error):
    """A bug, or a file or device of this host that fails."""

    code, name = 10, "INTERNAL"


_CLASSES: tuple[type[Error], ...] = (
    InvalidError, NotFoundError, TimeoutError, PeerLostError, StaleError, CorruptError,
    ExhaustedError, DeniedError, UnavailableError, InternalError)
_BY_CODE = {kind.code: kind for kind in _CLASSES}
_BY_NAME = {kind.name: kind for kind in _CLASSES}


def of_code(code: int, message: str) -> Error:
    """Returns the exception for a code of the C ABI that is not RK_OK."""
    return _BY_CODE.get(code, InternalError)(message or f"error {code} without a message")


def of_name(name: str, message: str) -> Error:
    """Returns the exception for ``error.code`` of the command's JSON."""
    return _BY_NAME.get(name.upper(), InternalError)(message)
