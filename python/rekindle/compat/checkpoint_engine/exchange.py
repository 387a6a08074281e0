"""Exchanges values of a `ParameterServer`'s ranks through torch.distributed's TCPStore."""
from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

from ...errors import TimeoutError, UnavailableError
from .update import Update

_LONGEST_SETUP = timedelta(minutes=10)
_LONGEST_LEAVE = timedelta(seconds=10)
_LEFT = "/left"
# How often a wait for the other ranks looks whether one has failed.
_LOOK = timedelta(milliseconds=200)


class RankError(UnavailableError, RuntimeError):
    """Another rank has failed. checkpoint-engine's class raises a RuntimeError in its place."""


class Exchange:
    """Every rank calls `gather` equally often with the same `what`, in the same order."""

    def __init__(self, rank: int, world: int, master: tuple[str, int] | None) -> None:
        """`master`: address and port where rank 0 holds the store; None: there is only one rank."""
        self._rank, self._world = rank, world
        self.store: Any = torch.distributed.HashStore()
        # A wait for others keeps a connection to the store from all other use.
        self.waiting: Any = self.store
        if master is not None:
            self.store = torch.distributed.TCPStore(*master, world, is_master=rank == 0,
                                                    timeout=_LONGEST_SETUP)
            self.waiting = torch.distributed.TCPStore(
                *master, world, is_master=False, timeout=_LONGEST_SETUP, wait_for_workers=False)
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

    def count(self, what: str) -> int:
        """Returns how many ranks have called this with `what`. Without rank 0, which holds the
        store, nobody else is there: the whole world."""
        try:
            return int(self.store.add(what, 1))
        except RuntimeError:
            return self._world

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

    # A caller of checkpoint-engine's class may only pass the addresses on.
    request_waits = False

    def __init__(self, exchange: Exchange, rank: int, ranks: list[int], name: str) -> None:
        super().__init__()
        self._store, self._waiting, self._rank = exchange.store, exchange.waiting, rank
        self._name = name
        self._failed = f"{name}/failed"
        self._begun_by = f"{name}/begun"
        self._without_broadcast = f"{name}/alone"
        self._copied = f"{name}/copied"
        self._all_copied = [f"{name}/copied/{other}" for other in ranks]
        self._mine = f"{name}/answered/{rank}"
        self._everyone = [f"{name}/answered/{other}" for other in ranks]

    def group(self) -> str:
        """Returns the group of the update's broadcast, the same on all ranks."""
        return str(self._store.compare_set(f"{self._name}/group", "", uuid.uuid4().hex).decode())

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._try(lambda: self._store.set(self._failed, f"rank {self._rank}: {error}"))

    def failure(self) -> Exception | None:
        mine = super().failure()
        if mine is None and self._try(lambda: self._store.check([self._failed])):
            other = self._try(lambda: self._store.get(self._failed))
            super().fail(RankError((other or b"another rank failed").decode()))
        return super().failure()

    def wait_for_all(self, timeout: float) -> None:
        """No worker may begin its post-processing before all have all tensors: from then on, it
        cannot be told that another one has failed.
        """
        deadline = time.monotonic() + timeout
        self._try(lambda: self._store.set(f"{self._copied}/{self._rank}", ""))
        while True:
            failure = self.failure()
            if failure is not None:
                raise failure
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not all workers have the weights after {timeout:g} s")
            try:
                self._store.wait(self._all_copied, _LOOK)
                return
            except torch.distributed.DistNetworkError as error:
                raise UnavailableError(f"the store of rank 0 is gone: {error}") from None
            except RuntimeError:  # DistStoreError: a timeout
                continue

    def answer(self) -> None:
        """Notes it on all ranks, and returns when all have, or the update has failed."""
        self._try(lambda: self._store.set(self._mine, ""))
        while self.failure() is None:
            try:
                self._waiting.wait(self._everyone, _LOOK)
                break
            except torch.distributed.DistNetworkError:
                break
            except RuntimeError:  # DistStoreError: a timeout
                continue
        super().answer()

    def begins(self) -> bool:
        return bool(self._try(lambda: self._store.add(self._begun_by, 1)) == 1)

    def go_alone(self) -> None:
        super().go_alone()
        self._try(lambda: self._store.set(self._without_broadcast, ""))

    def alone(self) -> bool:
        return super().alone() or bool(
            self._try(lambda: self._store.check([self._without_broadcast])))

    def _try(self, call: Callable[[], Any]) -> Any:
        """Calls the store. Ignores that it is gone: `gather`, which every rank calls in the end,
        reports that.
        """
        try:
            return call()
        except RuntimeError:
            return None
