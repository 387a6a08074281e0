"""Ranks that hold parts of one model: they take a step together, or it has failed on all of them.

Without that, one rank could take the engine's own weights, or keep those of before, beside ranks
that have loaded another version.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import Error, InternalError, of_name

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """What a rank met, as it is told to others: `name` is that of a code of Rekindle."""

    name: str
    text: str


class Ranks:
    """This rank among `size`. `gather(value)`: the values of all ranks, in their order; all call
    it, and it raises where a rank is gone."""

    def __init__(self, rank: int, size: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank, self.size = rank, size
        self._gather = gather

    def gather(self, value: T) -> list[T]:
        """Of all ranks, in their order. InternalError when one is gone."""
        if self.size == 1:
            return [value]
        try:
            return self._gather(value)
        except Exception as why:
            raise InternalError(f"a rank that holds a part of this model is gone: {why}") from why

    def first(self, value: T) -> T:
        """What the first rank says."""
        return self.gather(value)[0]

    def together(self, step: Callable[[], T], undo: Callable[[T], Any] | None = None) -> T:
        """Runs `step`, here and on all others.

        When it has failed anywhere, it raises on all ranks, with one code of Rekindle: that of the
        first failure that is a matter of something else than weights that cannot be had, or else of
        the first. `undo` takes back what was done here, if the failure was another rank's."""
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
                undo(done)  # type: ignore[arg-type]  # it is what step has returned
            raise
        met = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
        if not met:
            return done  # type: ignore[return-value]  # as above
        rank, worst = next(((rank, failure) for rank, failure in met
                            if failure.name not in ABOUT_WEIGHTS), met[0])
        if mine is not None and rank == self.rank:
            raise mine
        if mine is None and undo is not None:
            undo(done)  # type: ignore[arg-type]
        raise of_name(worst.name, f"rank {rank} of {self.size}: {worst.text}") from mine


# Codes of weights that cannot be had, as opposed to a wrong configuration or a model that they do
# not fit: an engine's own weights help then.
ABOUT_WEIGHTS = frozenset(
    ("NOT_FOUND", "TIMEOUT", "PEER_LOST", "STALE", "CORRUPT", "EXHAUSTED", "UNAVAILABLE"))

ONE = Ranks(0, 1, lambda value: [value])


def _told(why: Exception) -> _Failure:
    if isinstance(why, Error):
        return _Failure(why.name, str(why))
    return _Failure("INTERNAL", f"{type(why).__name__}: {why}")
