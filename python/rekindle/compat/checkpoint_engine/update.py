"""One update of an engine: a socket per device, and the request that makes the engine connect."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from ... import attach
from ...errors import PeerLostError, UnavailableError
from .buffers import DEFAULT_BYTES, device_key, is_cuda, make_buffer
from .channel import Channel, ReceiverEndedError
from .sender import ANSWER_TIMEOUT, Entry, sizes, transfer

# How often a pass over a model may attach, when agents restart.
_LIVES = 3
# Seconds for the engine's request to return after its ranks were aborted.
_ENGINE_GRACE = 10.0


class Source:
    """The tensors of one or several models, one after the other, for one device.

    models: "qwen3@41". agent: its store directory, or None. known: the sizes of `sender.sizes`,
    needed for several models. timeout: seconds for a bucket.
    """

    def __init__(self, models: Sequence[str], device: str | torch.device, *, agent: str | None,
                 attach_timeout: float, timeout: float = ANSWER_TIMEOUT,
                 known: tuple[int, int] | None = None) -> None:
        self.device = device
        self._models, self._agent = list(models), agent
        self._attach_timeout, self._timeout = attach_timeout, timeout
        self._first: Any = None
        self.model, self.version = "", 0
        self.largest, self.total = known or (0, 0)
        self._known = known is not None

    def prepare(self) -> None:
        """Attaches to the first model, so that its errors come before an engine is asked."""
        session = self._attach(self._models[0])
        self._first, self.model, self.version = session, session.model, session.version
        self._models[0] = f"{self.model}@{self.version}"
        if not self._known:
            self.largest, self.total = sizes(session)

    def buckets(self) -> Generator[Sequence[Entry], None, None]:
        """Yields lists of (name, tensor), each valid until the next. Every call begins anew.

        When the agent or its device process dies, continues after its restart.
        """
        for model in self._models:
            sent: set[str] = set()
            for left in reversed(range(_LIVES)):
                try:
                    yield from self._rest(model, sent)
                    break
                except (PeerLostError, UnavailableError):
                    if left == 0:
                        raise

    def _rest(self, model: str, sent: set[str]) -> Generator[Sequence[Entry], None, None]:
        session, self._first = self._first or self._attach(model), None
        with session:
            for bucket in session.buckets(self._timeout):
                yield [entry for entry in bucket if entry[0] not in sent]
                sent.update(name for name, _ in bucket)

    def close(self) -> None:
        if self._first is not None:
            self._first.close()
            self._first = None

    def _attach(self, model: str) -> Any:
        name, _, version = model.partition("@")
        with on_device(self.device):
            # The ranks' threads use the default stream. The caller's current stream may differ.
            return attach(name, version or "latest", device=self.device, stream=0,
                          agent=self._agent, timeout=self._attach_timeout)


class Update:
    """The state that the participants of an update share. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._answered = threading.Event()

    def fail(self, error: Exception) -> None:
        """Notes a failure, and ends the waits of all participants. The first failure is reported.
        """
        with self._lock:
            self._failure = self._failure or error

    def failure(self) -> Exception | None:
        with self._lock:
            return self._failure

    def answer(self) -> None:
        """Notes that the engine has answered the request."""
        self._answered.set()

    def answered(self) -> bool:
        return self._answered.is_set()


class Rank:
    """One device: its bound socket, and the tensors that go through it."""

    def __init__(self, source: Source, address: str, update: Update, *,
                 buffer_bytes: int = DEFAULT_BYTES, timeout: float = ANSWER_TIMEOUT) -> None:
        self.source, self.passes, self.nbytes = source, 0, 0
        self._update, self._buffer_bytes, self._timeout = update, buffer_bytes, timeout
        self._channel = Channel(address, stop=update.failure)
        self.handle = (device_key(source.device), self._channel.address)

    def run(self) -> None:
        """Feeds every worker that connects, until the engine has answered.

        An engine with a draft model takes the weights once for each of its models, over the same
        socket. Errors also go to the update.
        """
        try:
            if not self._channel.wait_for_receiver(self._timeout, until=self._update.answered):
                raise UnavailableError(f"the engine has answered, but none of its workers took "
                                       f"weights for {self.handle[0]}: is it one of its devices?")
            self._pass()
            while self._channel.wait_for_receiver(self._timeout, until=self._update.answered):
                self._pass()
        except Exception as error:
            self._update.fail(error)
            raise

    def close(self) -> None:
        self._channel.close()
        self.source.close()

    def _pass(self) -> None:
        source = self.source
        with on_device(source.device), contextlib.closing(source.buckets()) as buckets:
            try:
                buffer = make_buffer(source.device, source.largest, source.total,
                                     self._buffer_bytes)
            except Exception as error:
                self._channel.abort(error)
                raise
            try:
                self.nbytes += transfer(self._channel, buffer, buckets, timeout=self._timeout)
            except ReceiverEndedError as ended:
                # The engine's answer decides whether this is a failure.
                self.nbytes += ended.nbytes
                self._channel.reopen()
        self.passes += 1


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
