"""The versions of this process that are taken beside those that serve, until their switch."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import NotFoundError
from .loading import Next
from .options import Options

# The versions that models get next, by role.
_next: dict[str, Next] = {}


def keep(role: str, declared: Callable[[], Next]) -> dict[str, Any]:
    """Keeps a version for the switch, in place of an earlier one. Returns its state."""
    unstage(role)
    _next[role] = declared()
    return staged_status(role)


def staged_status(role: str, timeout: float = 0.0) -> dict[str, Any]:
    """Returns the state of the version that waits for its switch. Waits at most `timeout` seconds
    for its last byte. NotFoundError: there is none."""
    following = _next.get(role)
    if following is None:
        raise NotFoundError("no version is staged: stage one before")
    arrived = following.staged.wait(timeout)
    reason = following.staged.reason
    return {"model": following.wanted.options.name, "version": following.wanted.options.version,
            "staged": arrived and reason is None, "why_not": reason,
            "phases": following.staged.phases}


def take_staged(role: str, options: Options | None = None) -> Next | None:
    """Returns the version that was staged, once. With `options`, an other version is given up."""
    following = _next.pop(role, None)
    if following is None or options is None:
        return following
    asked = following.wanted.options
    if (asked.name, str(asked.version)) == (options.name, str(options.version)):
        return following
    following.staged.close()
    return None


def unstage(role: str) -> None:
    """Gives up the version that was staged, if there is one."""
    following = _next.pop(role, None)
    if following is not None:
        following.staged.close()
