"""The versions of vLLM that this works with."""
from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version as installed

from ..errors import InvalidError

# 0.23.0 and 0.33.0 were run, 0.26.0 read: docs/guides/engines.md.
OLDEST, NEWEST = (0, 23), (0, 33)


def check() -> str:
    """Returns the installed version of vLLM.

    InvalidError: there is none, or it is outside the range, and its behaviour is unknown."""
    try:
        found = installed("vllm")
    except PackageNotFoundError:
        raise InvalidError("vLLM is not installed") from None
    if not supported(found):
        raise InvalidError(
            f"vLLM {found} is not known to rekindle.vllm, which is for {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]}; use another version of one of them")
    return found


def supported(version: str) -> bool:
    numbers = version.split("+")[0].split(".")
    try:
        release = int(numbers[0]), int(numbers[1])
    except (IndexError, ValueError):
        return False
    return OLDEST <= release <= NEWEST
