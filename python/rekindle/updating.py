"""Brings a published version to all workers of a group, by broadcast where possible."""
from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from . import _abi
from ._attaching import environment
from ._native import Native, milliseconds, run_interruptibly, text
from .errors import Error, InvalidError

UNTIL_DONE_S = 600.0


class Phase(NamedTuple):
    """One phase of an update over the workers that have reported it. Times are seconds."""
    median: float
    p95: float
    # The slowest worker, "rank 1 of i on b", and its time.
    slowest: str
    slowest_time: float


class UpdateResult(NamedTuple):
    # Workers that were present at the start of the round.
    members: int
    # Members that serve the version or are able to.
    ready: int
    # Ready members that received every byte by broadcast.
    by_broadcast: int
    elapsed: float  # seconds
    # By "declare", "copy", "spread", "verify", "apply", "resume". Phases that no worker has reported
    # are absent.
    phases: dict[str, Phase]


def update(model_version: str, *, group: str | None = None, gather: float | None = None,
           members: int = 0, timeout: float | None = UNTIL_DONE_S,
           agent: str | os.PathLike[str] | None = None) -> UpdateResult:
    """Brings "qwen3@42", published before, to the workers of `group` (None: all groups with workers
    of the model). Returns when the round is over.

    `gather`: seconds for the workers to attach; the round then begins without the rest. None: 5.
    `members`: within that time, the round also waits for this many workers. Workers that have just
    attached may not be known to the coordinator yet.
    `timeout`: seconds for the whole update; None: a month.
    Raises NotFoundError (no such version, or no worker in the group), TimeoutError (the round goes
    on), or UnavailableError: another round runs, there is no coordinator, or some members are not
    ready. In the last case the message names one member and the reason, and the exception's
    `result` has the counts."""
    if members < 0:
        raise InvalidError(f"an update that waits for {members} members")
    native = Native(agent if agent is not None else environment("STORE"), 5.0, "connection")
    options = _abi.UpdateOptions(
        size=ctypes.sizeof(_abi.UpdateOptions), model_version=text(model_version),
        group=text(group),
        # 0 stands for the default in C.
        gather_ms=0 if gather is None else max(1, milliseconds(gather)),
        timeout_ms=max(1, milliseconds(timeout, 30 * 24 * 3600 * 1000)), members=members)
    result = _abi.UpdateResult(size=ctypes.sizeof(_abi.UpdateResult))
    try:
        run_interruptibly(
            lambda: native.call_agent("rk_update", ctypes.byref(options), ctypes.byref(result)),
            native.cut)
    except Error as why:
        why.result = _result_of(result)  # type: ignore[attr-defined]
        raise
    finally:
        native.end()
    return _result_of(result)


def _result_of(result: _abi.UpdateResult) -> UpdateResult:
    phases = {phase.name.decode(): Phase(
        phase.median_us / 1e6, phase.p95_us / 1e6, phase.slowest.decode("utf-8", "replace"),
        phase.slowest_us / 1e6) for phase in result.phases[:result.phase_count]}
    return UpdateResult(result.members, result.ready, result.by_broadcast, result.elapsed_ms / 1e3,
                        phases)
