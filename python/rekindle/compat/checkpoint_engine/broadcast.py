"""The broadcast of one update: each device uploads a part, and the devices give it to each other.

Rekindle's rounds (docs/internals/rounds.md) begin with workers that are there. So each device of
the update first takes a seat: a session of a group that no other update has. When its engine's
worker has connected, the device attaches again. The first one to do so begins the round, which
gathers the others for some seconds. Late devices, and all of them if there is no round (no
coordinator, or one that refuses), upload everything.
"""
from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from ... import Box, attach
from ... import update as begin_round
from ...errors import Error

if TYPE_CHECKING:
    from .update import Update

# How often a device that waits for the round looks whether there will be none.
_LOOK_S = 0.05
# An engine's workers connect together. Not longer, for devices that the engine does not use.
_GATHER_S = 5.0
_LONGEST_ROUND_S = 3600.0


class Broadcast:
    """The round that brings `model`, "qwen3@41", to `members` devices. Any of them may begin it."""

    def __init__(self, model: str, group: str, members: int, update: Update, *,
                 agent: str | None, timeout: float) -> None:
        """timeout: seconds to attach."""
        self.model, self.group, self.update = model, group, update
        self.agent, self.timeout = agent, timeout
        self._members = members

    def begin(self) -> None:
        """Begins the round, unless another device has. Returns at once."""
        if self.update.begins():
            threading.Thread(target=self._run, daemon=True, name="rekindle-round").start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(Error):
                begin_round(self.model, group=self.group, members=self._members, gather=_GATHER_S,
                            timeout=_LONGEST_ROUND_S, agent=self.agent)
        finally:
            # There is no round, or no longer one.
            self.update.go_alone()


class Seat:
    """The place of one device in a broadcast. Taking it attaches, and raises its errors."""

    def __init__(self, broadcast: Broadcast, member: int) -> None:
        self.membership: dict[str, Any] = {"group": broadcast.group,
                                           "instance": f"{broadcast.group}-{member}"}
        self._broadcast = broadcast
        # The smallest part of the version: a host that lacks the version fetches no more for it.
        self._session: Any = attach(broadcast.model, None, shard=[Box("")], agent=broadcast.agent,
                                    timeout=broadcast.timeout, rank=0, world=1, generation=0,
                                    **self.membership)

    def wait(self, timeout: float) -> bool:
        """Begins the round, or waits until it gathers. Returns False if there is none. The seat is
        given up. Raises the failure of the update."""
        deadline = time.monotonic() + timeout
        update = self._broadcast.update
        with self._session as session:
            self._broadcast.begin()
            while not update.alone() and time.monotonic() < deadline:
                failure = update.failure()
                if failure is not None:
                    raise failure
                found = session.wait_for_update(_LOOK_S)
                if found is not None:
                    return bool(found == session.version)
        return False

    def close(self) -> None:
        self._session.close()
