"""A standby of `rekindle run --standby`: a process that has started up and waits to take over."""
from __future__ import annotations

import math
import os
import struct
import time
from typing import TYPE_CHECKING

from . import errors

if TYPE_CHECKING:
    import socket

_VARIABLE = "REKINDLE_STANDBY"
_GO = b"go\n"
_LONGEST = 1 << 16


def is_standby() -> bool:
    """Whether this process is a standby that has not taken over yet."""
    return bool(os.environ.get(_VARIABLE))


def wait(timeout: float | None = None) -> bool:
    """Waits until this process takes over from a worker that has failed. Then sets the variables of
    the environment that have changed, such as REKINDLE_FAILURES, and returns True.

    Returns False at once in a process that is no standby. `attach` and the calls
    that publish tensors wait here first: call it yourself to wait at another place. `timeout`: None:
    without end. Raises TimeoutError, and UnavailableError when `rekindle run` has ended."""
    name = os.environ.get(_VARIABLE)
    if not name:
        return False
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    for line in _answer(name, deadline).decode("utf-8", "surrogateescape").splitlines():
        variable, equals, value = line.partition("=")
        if equals:
            os.environ[variable] = value
    # The processes that this one starts from now on are no standbys.
    os.environ.pop(_VARIABLE, None)
    return True


def _answer(name: str, deadline: float) -> bytes:
    """Returns what `rekindle run` says once it has chosen this process."""
    import socket
    gone = errors.UnavailableError("this process is a standby, and the `rekindle run` that started "
                                   "it has ended")
    data = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect("\0" + name)
            _check_user(connection, name)
            while not (data == _GO or data.endswith(b"\n" + _GO)):
                left = deadline - time.monotonic()
                connection.settimeout(None if left == math.inf else max(left, 0.001))
                part = connection.recv(4096)
                if not part or len(data) > _LONGEST:
                    raise gone
                data += part
        except TimeoutError:
            raise errors.TimeoutError("this standby was not chosen yet") from None
        except OSError as why:
            if isinstance(why, errors.Error):
                raise
            raise gone from None
    return data


def _check_user(connection: "socket.socket", name: str) -> None:
    import socket
    format_ = "3i"
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(format_))
    user = struct.unpack(format_, peer)[1]
    if user not in (0, os.geteuid()):
        raise errors.DeniedError(f"{_VARIABLE}={name} is a socket of user {user}, not of ours")
