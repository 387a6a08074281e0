"""A version that is taken into memory beside the one that serves, and then takes its place.

The bytes come while the engine serves. In the engine's pause only copies on the device remain. If
there is no room for the bytes, the version is loaded in the pause, as without staging.
"""
from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .errors import Error, ExhaustedError, InvalidError, StaleError

if TYPE_CHECKING:
    from .session import Session

logger = logging.getLogger("rekindle")
# "auto": where memory allows it. "require": ExhaustedError where it does not. "off": never.
Mode = Literal["auto", "require", "off"]
MODES = ("auto", "require", "off")
# Bytes that stay free on the device, for the engine.
RESERVE = 1 << 30


class Staging(NamedTuple):
    mode: str = "auto"
    reserve: int = RESERVE

    def check(self) -> "Staging":
        """Returns itself. InvalidError: no such mode, or a negative reserve."""
        if self.mode not in MODES:
            raise InvalidError(f"staging is one of {', '.join(MODES)}, not {self.mode!r}")
        if self.reserve < 0:
            raise InvalidError(f"staging cannot leave {self.reserve} bytes free")
        return self


class Phases:
    """Seconds that the phases of one update took in this process. A phase may have several pieces;
    it began with the first one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        self._begun.setdefault(name, begun)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def report(self, session: "Session") -> None:
        """Tells the agent. An update does not fail because nobody takes the figures."""
        try:
            now = time.perf_counter()
            session.report_phases(self.seconds, {name: now - begun for name, begun
                                                 in self._begun.items()})
        except Error as why:
            logger.info("rekindle: the phases of the update were not reported: %s", why)


class Staged:
    """A version beside the one that serves. One thread uses it; another one takes the bytes."""

    def __init__(self, attach: Callable[[bool], "Session"], staging: Staging,
                 timeout: float | None, phases: Phases) -> None:
        """`attach`: returns a session; its argument says whether it is staged. `timeout`: seconds
        without a new byte. ExhaustedError: there is no room, and staging is required."""
        self._attach, self._staging, self._timeout = attach, staging.check(), timeout
        self._phases = phases
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._closed = False
        self._reason: str | None = 'staging is "off"' if staging.mode == "off" else None
        if self._reason is None:
            self._begin()

    @property
    def reason(self) -> str | None:
        """Why the version is loaded in the pause instead; None: it is staged, or still may be."""
        return self._reason

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase so far."""
        return dict(self._phases.seconds)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every byte is staged, or until `reason` says why none will be. Returns False
        after `timeout` seconds. Raises the error of a failure if staging is required."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            self._give_up(failed)
        return True

    def close(self) -> None:
        """Gives the version up. What serves is untouched. A second call does nothing."""
        session, self._session = self._session, None
        self._closed = True
        if session is not None:
            if self._thread is not None:
                # Otherwise its call goes on as long as bytes come.
                session._native.cut()
            session.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._failed = None

    def take(self) -> "Session":
        """For the engine's pause: returns the session, which has its rank of the instance from now
        on. The caller loads it, commits, and closes it. Raises what `rekindle.attach` raises.
        InvalidError: other ranks switch to another version. If the staged session has ended, it
        attaches again, or raises that error if staging is required."""
        if self._closed:
            why = f" ({self._reason})" if self._reason else ""
            raise StaleError(f"this staged version was given up{why}: stage it again")
        self.wait(None)
        session, self._session = self._session, None
        if session is None:
            return self._attach(False)
        try:
            session.begin_switch()
        except BaseException as why:
            session.close()
            # Other ranks switch to another version.
            if isinstance(why, InvalidError):
                self._reason, self._closed = str(why), True
                raise
            # The session has ended meanwhile, with its own error. Nothing was written yet.
            self._give_up(why)
            return self._attach(False)
        return session

    def _begin(self) -> None:
        session = self._attach(True)
        try:
            session.check_stage(self._staging.reserve)
        except ExhaustedError as why:
            self._session = session
            self._give_up(why)
            return
        except BaseException:
            session.close()
            raise
        self._session = session
        self._thread = threading.Thread(target=self._run, args=(session,), name="rekindle-stage",
                                        daemon=True)
        self._thread.start()

    def _run(self, session: "Session") -> None:
        try:
            with self._phases.measure("copy"):
                session.stage(self._staging.reserve, self._timeout)
        except BaseException as why:  # raised, or logged, by wait()
            self._failed = why

    def _give_up(self, why: BaseException) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
        self._reason = str(why) or type(why).__name__
        if self._staging.mode == "require" or not isinstance(why, Error):
            self._closed = True
            raise why
        logger.warning("rekindle: the version is loaded in the engine's pause: %s", self._reason)


def side_stream(device: Any) -> dict[str, Any]:
    """Returns the stream of a staged session on this device, as an argument of `rekindle.attach`.
    Its copies do not wait for the work of the engine."""
    if device is None or not str(device).startswith("cuda"):
        return {}
    import torch
    return {"stream": torch.cuda.Stream(str(device))}


@contextlib.contextmanager
def applying(session: "Session") -> Iterator[None]:
    """A context for loading a session over what serves. Work on the device that the engine has
    queued ends first. torch's work in the context runs on the session's stream, and has ended after
    it."""
    device: Any = session._device
    if device is None or device.torch_name == "cpu":
        yield
        return
    import torch
    torch.cuda.synchronize(device.torch_name)
    with device.on_stream():
        yield
    device.synchronize()
