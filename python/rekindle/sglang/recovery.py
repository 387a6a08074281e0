"""Weights of experts whose ranks are gone, for SGLang's elastic expert parallelism.

Each remaining rank finds out by itself which experts it lacks, and asks for them, or for nothing,
at its own time. So it must not wait for other ranks. It gets the experts of the held version, on
which all ranks agreed when they loaded it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import InternalError

T = TypeVar("T")
LOAD_FORMAT = "rekindle"


@dataclass
class Recovery:
    """A request for tensors. `given`: all of them were taken."""

    wanted: Callable[[str], bool]  # by a tensor's name
    given: bool = False

    def giving(self, pairs: Iterable[T]) -> Iterator[T]:
        """Yields `pairs`, and notes that all were taken."""
        yield from pairs
        self.given = True


_current: ContextVar[Recovery | None] = ContextVar("rekindle_sglang_recovery", default=None)


def current() -> Recovery | None:
    """Returns the recovery in which SGLang asks for weights; None: there is none."""
    return _current.get()


def recovering(original: Callable[..., None], **named: Any) -> None:
    """Around `update_expert_location_with_recovery` of SGLang's eplb_manager.

    InternalError when the experts could not be loaded. SGLang ignores that, and would serve
    whatever is in their memory."""
    update = named["update_weights_from_disk_callable"]

    def from_held(path: str, load_format: str,
                  weight_name_filter: Callable[[str], bool] | None = None) -> tuple[bool, str]:
        if load_format.lower() != LOAD_FORMAT:
            return update(path, load_format, weight_name_filter=weight_name_filter)
        recovery = Recovery(weight_name_filter or (lambda name: True))
        token = _current.set(recovery)
        try:
            done: tuple[bool, str] = update(
                path, load_format, weight_name_filter=weight_name_filter)
        finally:
            _current.reset(token)
        if not done[0] and not recovery.given:
            # A second attempt may already have given the weights.
            raise InternalError(
                f"weights of experts whose ranks are gone were not loaded: {done[1]}")
        return done

    original(**{**named, "update_weights_from_disk_callable": from_held})
