"""One update of an engine: a socket per device, and the request that makes the engine connect."""
from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from ... import attach
from ...errors import Error, PeerLostError, TimeoutError, UnavailableError
from .broadcast import Broadcast, Seat
from .buffers import DEFAULT_BYTES, Buffer, device_key, is_cuda, make_buffer
from .channel import Channel, ReceiverEndedError
from .sender import ANSWER_TIMEOUT, Entry, transfer

# How often a pass over a model may attach, when agents restart.
_LIVES = 3
# Seconds for the engine's request to return after its ranks were aborted.
_ENGINE_GRACE = 10.0
# How often a wait for a bucket looks whether the update has failed, in seconds.
_LOOK_S = 0.2


class Source:
    """The tensors of one version for one device.

    model: "qwen3@41". agent: its store directory, or None. sizes: those of `sender.sizes`.
    timeout: seconds for a bucket. stop: returns an exception that ends the wait for one.
    """

    def __init__(self, model: str, device: str | torch.device, sizes: tuple[int, int], *,
                 agent: str | None, attach_timeout: float, timeout: float = ANSWER_TIMEOUT,
                 stop: Callable[[], Exception | None] = lambda: None) -> None:
        self.device, self.sizes = device, sizes
        self._model, self._agent = model, agent
        self._attach_timeout, self._timeout, self._stop = attach_timeout, timeout, stop
        self._seat: Seat | None = None
        # The session whose buckets are taken, or will be.
        self._session: Any = None
        self._broadcast = False

    def prepare(self, broadcast: Broadcast | None = None, member: int = 0) -> None:
        """Attaches, so that errors come before an engine is asked. The first pass takes part in the
        broadcast, if there is one.
        """
        if broadcast is not None:
            self._seat = Seat(broadcast, member)
        else:
            self._session = self._attach()

    def buckets(self) -> Generator[Sequence[Entry], None, None]:
        """Yields lists of (name, tensor), each valid until the next, the last one until `finish`.
        Every call begins anew.

        When the agent or its device process dies, continues after its restart.
        """
        sent: set[str] = set()
        for left in reversed(range(_LIVES)):
            try:
                for bucket in self._arriving(self._opened()):
                    yield [entry for entry in bucket if entry[0] not in sent]
                    sent.update(name for name, _ in bucket)
                return
            except (PeerLostError, UnavailableError):
                self.close()
                if left == 0:
                    raise

    def finish(self) -> None:
        """Gives back what brought the buckets."""
        if self._broadcast:
            # The round ends without it, too.
            with contextlib.suppress(Error):
                self._session.commit(timeout=self._attach_timeout)
        self.close()

    def close(self) -> None:
        for opened in (self._session, self._seat):
            if opened is not None:
                opened.close()
        self._session = self._seat = None
        self._broadcast = False

    def _opened(self) -> Any:
        if self._session is None and self._seat is not None:
            seat, self._seat = self._seat, None
            if seat.wait(self._timeout):
                self._session = self._attach(generation=1, **seat.membership)
                self._broadcast = True
        if self._session is None:
            self._session = self._attach()
        return self._session

    def _arriving(self, session: Any) -> Generator[Sequence[Entry], None, None]:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                for bucket in session.buckets(_LOOK_S):
                    yield bucket
                    deadline = time.monotonic() + self._timeout
                return
            except TimeoutError:
                reason = self._stop()
                if reason is not None:
                    raise reason from None
                if time.monotonic() >= deadline:
                    raise

    def _attach(self, **membership: Any) -> Any:
        with on_device(self.device):
            # The ranks' threads use the default stream. The caller's current stream may differ.
            return attach(self._model, None, device=self.device, stream=0, agent=self._agent,
                          timeout=self._attach_timeout, rank=0, world=1, **membership)


class Update:
    """The state that the participants of an update share. For any thread."""

    # Whether the request returns only when the engine has everything.
    request_waits = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._answered = threading.Event()
        self._alone = threading.Event()
        self._begun = False
        # Readable when the engine has answered.
        self.woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.woken)

    def fail(self, error: Exception) -> None:
        """Notes a failure, and ends the waits of all participants. The first failure is reported.
        """
        with self._lock:
            self._failure = self._failure or error

    def failure(self) -> Exception | None:
        with self._lock:
            return self._failure

    def wait_for_all(self, timeout: float) -> None:
        """Notes that a worker has read all tensors. Where that is possible, waits for the workers
        of all participants, and raises the failure of one.
        """

    def answer(self) -> None:
        """Notes that the engine has answered the request."""
        self._answered.set()
        os.eventfd_write(self.woken, 1)

    def answered(self) -> bool:
        return self._answered.is_set()

    def begins(self) -> bool:
        """Whether this is the first call of any participant."""
        with self._lock:
            begun, self._begun = self._begun, True
        return not begun

    def go_alone(self) -> None:
        """Notes that no broadcast brings bytes to devices that wait for it."""
        self._alone.set()

    def alone(self) -> bool:
        return self._alone.is_set()


class Rank:
    """One device: its bound socket, and the tensors that go through it."""

    def __init__(self, source: Source, address: str, update: Update, *,
                 buffer_bytes: int = DEFAULT_BYTES, timeout: float = ANSWER_TIMEOUT) -> None:
        self.source, self.passes, self.nbytes = source, 0, 0
        self._update, self._buffer_bytes, self._timeout = update, buffer_bytes, timeout
        self._channel = Channel(address, stop=update.failure, woken=update.woken)
        self.handle = (device_key(source.device), self._channel.address)

    def run(self) -> None:
        """Feeds every worker that connects, until the engine has answered.

        An engine with a draft model takes the weights once for each of its models, over the same
        socket. Errors also go to the update.
        """
        try:
            with on_device(self.source.device):
                self._feed()
        except Exception as error:
            self._update.fail(error)
            raise

    def close(self) -> None:
        self._channel.close()
        self.source.close()

    def _feed(self) -> None:
        # Before the first worker connects, which takes time, too.
        buffer = self._make_buffer()
        try:
            answered = self._update.answered if self._update.request_waits else None
            if not self._channel.wait_for_receiver(self._timeout, until=answered):
                raise UnavailableError(f"the engine has answered, but none of its workers took "
                                       f"weights for {self.handle[0]}: is it one of its devices?")
            self._pass(buffer)
            while self._channel.wait_for_receiver(self._timeout, until=self._update.answered):
                self._pass(self._make_buffer())
        finally:
            if not isinstance(buffer, Exception):
                buffer.release()

    def _make_buffer(self) -> Buffer | Exception:
        """Returns an error instead of raising it: only a worker that has connected can be told."""
        try:
            return make_buffer(self.source.device, *self.source.sizes, self._buffer_bytes)
        except Exception as error:
            return error

    def _pass(self, buffer: Buffer | Exception) -> None:
        if isinstance(buffer, Exception):
            self._channel.abort(buffer)
            raise buffer
        with contextlib.closing(self.source.buckets()) as buckets:
            try:
                self.nbytes += transfer(self._channel, buffer, buckets, timeout=self._timeout,
                                        copied=self._copied)
            except ReceiverEndedError as ended:
                # The engine's answer decides whether this is a failure.
                self.nbytes += ended.nbytes
                self._channel.reopen()
        self.passes += 1

    def _copied(self) -> None:
        self.source.finish()
        if self.passes == 0:
            self._update.wait_for_all(self._timeout)


def deliver(ranks: Sequence[Rank], request: Callable[[], None], update: Update,
            timeout: float) -> None:
    """Makes the request, and runs each rank in a thread meanwhile. Returns when all have ended.

    Raises the first failure. Every wait is bounded: a rank's by its timeout, and the engine's
    answer after that by `timeout`, or by 10 s if a rank has failed.
    """
    asking = threading.Thread(target=_ask, args=(request, update), daemon=True, name="rekindle-ask")
    running = [threading.Thread(target=_quietly, args=(rank.run,), daemon=True,
                                name=f"rekindle-{rank.handle[0]}") for rank in ranks]
    try:
        for thread in [*running, asking]:
            thread.start()
        for thread in running:
            thread.join()
    except BaseException as error:
        # Includes KeyboardInterrupt: no worker may be left waiting.
        update.fail(UnavailableError(f"interrupted: {type(error).__name__}"))
        for thread in running:
            thread.join()
        raise
    asking.join(_ENGINE_GRACE if update.failure() else timeout)
    if update.failure() is None and asking.is_alive():
        update.fail(UnavailableError(f"the engine has all weights, but has not answered its "
                                     f"request in {timeout:g} s"))
    failure = update.failure()
    if failure is not None:
        raise failure


def on_device(device: str | torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(torch.device(device)) if is_cuda(device) else contextlib.nullcontext()


def _ask(request: Callable[[], None], update: Update) -> None:
    try:
        request()
    except Exception as error:
        update.fail(error)
    finally:
        update.answer()


def _quietly(run: Callable[[], None]) -> None:
    # The update has the error.
    with contextlib.suppress(Exception):
        run()
