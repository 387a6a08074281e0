"""Ranks that hold parts of one model take each step together: it succeeds or fails on all of them.

Otherwise one rank could use the engine's own weights, or keep its old ones, beside ranks that have
loaded another version.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import Error, InternalError, of_name

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """A rank's failure, as other ranks see it. `name`: of an error code of Rekindle."""

    name: str
    text: str


class Ranks:
    """This rank among `size` ranks. `gather(value)` returns the values of all ranks, in their
    order. All ranks call it. It raises when a rank is gone."""

    def __init__(self, rank: int, size: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank, self.size = rank, size
        self._gather = gather

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in their order. InternalError: a rank is gone."""
        if self.size == 1:
            return [value]
        try:
            return self._gather(value)
        except Exception as why:
            raise InternalError(f"a rank that holds a part of this model is gone: {why}") from why

    def first(self, value: T) -> T:
        """Returns the value of the first rank."""
        return self.gather(value)[0]

    def together(self, step: Callable[[], T], undo: Callable[[T], Any] | None = None) -> T:
        """Runs `step`, on this rank and on all others.

        When it fails on any rank, all ranks raise, with one code: that of the first failure whose
        code is not in ABOUT_WEIGHTS, or else of the first failure. `undo` reverts this rank's step
        if only other ranks have failed."""
        done: T | None = None
        mine: Exception | None = None
        try:
            done = step()
        except Exception as why:
            mine = why
        try:
            failures = self.gather(None if mine is None else _told(mine))
        except Error:
            if mine is not None:
                raise mine
            if undo is not None:
                undo(done)  # type: ignore[arg-type]  # the result of step()
            raise
        met = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
        if not met:
            return done  # type: ignore[return-value]  # the result of step()
        rank, worst = next(((rank, failure) for rank, failure in met
                            if failure.name not in ABOUT_WEIGHTS), met[0])
        if mine is not None and rank == self.rank:
            raise mine
        if mine is None and undo is not None:
            undo(done)  # type: ignore[arg-type]
        raise of_name(worst.name, f"rank {rank} of {self.size}: {worst.text}") from mine


# With these codes, the weights are not available, and an engine's own weights help. Other codes
# mean a wrong configuration, or a model that the weights do not fit.
ABOUT_WEIGHTS = frozenset(
    ("NOT_FOUND", "TIMEOUT", "PEER_LOST", "STALE", "CORRUPT", "EXHAUSTED", "UNAVAILABLE"))

ONE = Ranks(0, 1, lambda value: [value])


def _told(why: Exception) -> _Failure:
    if isinstance(why, Error):
        return _Failure(why.name, str(why))
    return _Failure("INTERNAL", f"{type(why).__name__}: {why}")
