"""Exchanges values of a `ParameterServer`'s ranks through torch.distributed's TCPStore."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

from ...errors import TimeoutError, UnavailableError
from .update import Update

_LONGEST_SETUP = timedelta(minutes=10)
_LONGEST_LEAVE = timedelta(seconds=10)
_LEFT = "/left"


class Exchange:
    """Every rank calls `gather` equally often with the same `what`, in the same order."""

    def __init__(self, rank: int, world: int, master: tuple[str, int] | None) -> None:
        """`master`: address and port where rank 0 holds the store; None: there is only one rank."""
        self._rank, self._world = rank, world
        self.store: Any = torch.distributed.HashStore()
        if master is not None:
            self.store = torch.distributed.TCPStore(*master, world, is_master=rank == 0,
                                                    timeout=_LONGEST_SETUP)
        self._counts: dict[str, int] = {}

    def gather(self, what: str, value: Any, timeout: timedelta) -> list[Any]:
        """Returns the `value` (JSON) of every rank, by rank, once all have called.

        TimeoutError names the ranks that have not called in time. UnavailableError: rank 0, which
        holds the store, is gone.
        """
        count = self._counts[what] = self._counts.get(what, 0) + 1
        keys = [f"{what}/{count}/{rank}" for rank in range(self._world)]
        try:
            self.store.set(keys[self._rank], json.dumps(value))
            if count > 1:
                # All ranks have called, so all have read the previous values.
                self.store.wait(keys, timeout)
                self._forget(f"{what}/{count - 1}/{self._rank}")
            self.store.wait(keys, timeout)
            found = [json.loads(self.store.get(key)) for key in keys]
        except torch.distributed.DistNetworkError as error:
            raise UnavailableError(f"the store of rank 0 is gone: {error}") from None
        except RuntimeError as error:  # DistStoreError: a timeout
            late = [rank for rank, key in enumerate(keys) if not self._has(key)]
            raise TimeoutError(f"{what}: ranks {late} did not come in "
                               f"{timeout.total_seconds():g} s: {error}") from None
        self._leave(keys)
        return found

    def _forget(self, key: str) -> None:
        self.store.delete_key(key)
        if self._rank:
            self.store.delete_key(key + _LEFT)

    def _leave(self, keys: list[str]) -> None:
        """Lets rank 0 leave last: it holds the store, and may end as soon as it has returned."""
        with contextlib.suppress(RuntimeError):
            if self._rank:
                self.store.set(keys[self._rank] + _LEFT, "")
            elif self._world > 1:
                self.store.wait([key + _LEFT for key in keys[1:]], _LONGEST_LEAVE)

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError:
            return False


class SharedUpdate(Update):
    """An update of several ranks. The failure of one ends all. The update is answered when each
    rank's request has returned.
    """

    def __init__(self, exchange: Exchange, rank: int, ranks: list[int], name: str) -> None:
        super().__init__()
        self._store, self._rank = exchange.store, rank
        self._failed = f"{name}/failed"
        self._mine = f"{name}/answered/{rank}"
        self._everyone = [f"{name}/answered/{other}" for other in ranks]

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._try(lambda: self._store.set(self._failed, f"rank {self._rank}: {error}"))

    def failure(self) -> Exception | None:
        mine = super().failure()
        if mine is None and self._try(lambda: self._store.check([self._failed])):
            other = self._try(lambda: self._store.get(self._failed))
            super().fail(UnavailableError((other or b"another rank failed").decode()))
        return super().failure()

    def answer(self) -> None:
        super().answer()
        self._try(lambda: self._store.set(self._mine, ""))

    def answered(self) -> bool:
        return super().answered() and bool(self._try(lambda: self._store.check(self._everyone)))

    def _try(self, call: Callable[[], Any]) -> Any:
        """Calls the store. Ignores that it is gone: `gather`, which every rank calls in the end,
        reports that.
        """
        try:
            return call()
        except RuntimeError:
            return None
