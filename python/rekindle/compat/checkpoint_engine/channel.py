"""The socket to one worker of an engine.

checkpoint-engine's sender is a REQ socket. A DEALER that adds the empty delimiter is the same on
the wire, and may also send while an answer is outstanding. So it can tell a worker to give up when
this side fails. A monitor reports when a worker connects and disconnects, so the death of a worker
is an error at once, not at a deadline.
"""
from __future__ import annotations

import contextlib
import os
import pickle
import stat
import tempfile
import time
from collections.abc import Callable
from types import TracebackType

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...errors import InvalidError, TimeoutError

# The time between two calls of `stop` during a wait.
_SLICE_MS = 200
_LINGER_MS = 2000
_ABORT_GRACE = 5.0  # s
_OVERLAP = 2.0  # s
_LONGEST_PATH = 107  # of a Unix socket
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ReceiverError(RuntimeError):
    """An engine's worker has failed. `text` is its whole message, with its traceback."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class ReceiverLostError(ReceiverError, ConnectionError):
    """An engine's worker has died or closed its socket before the end."""


class ReceiverEndedError(ReceiverLostError):
    """A worker has gone after it took every tensor, all `nbytes`, and released the buffer, but
    before it reported the end of its post-processing. Either it died there, or it is of
    checkpoint-engine before 0.4, which reports that with the last answer. Only the engine knows.
    """

    def __init__(self, message: str, nbytes: int) -> None:
        super().__init__(message)
        self.nbytes = nbytes


def private_directory(parent: str | os.PathLike[str] | None = None
                      ) -> tempfile.TemporaryDirectory[str]:
    """Makes a directory of mode 0700 for sockets. Closing removes it.

    `parent`: a directory that the engine sees under the same path, when it runs in another mount
    namespace; None: the system's directory for temporary files.
    """
    return tempfile.TemporaryDirectory(prefix="rekindle-", dir=parent, ignore_cleanup_errors=True)


def socket_file(address: str) -> str:
    """Returns the path in `address` ("ipc:///run/x/0.sock", or a path), in a directory of this user
    only.

    InvalidError: an abstract or network address, or a directory that others can enter. A user who
    can bind to the address or connect to it could send pickles to the engine, or take the weights.
    """
    path = address.removeprefix("ipc://")
    if path.startswith("@") or "://" in path:
        raise InvalidError(f"'{address}' is no socket file: use ipc:///DIRECTORY/NAME, in a "
                           f"directory of mode 0700")
    path = os.path.abspath(path)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidError(f"'{path}' is longer than the {_LONGEST_PATH} bytes of a socket's path")
    directory = os.path.dirname(path)
    try:
        status = os.stat(directory)
    except OSError as error:
        raise InvalidError(f"'{directory}' for the socket: {error.strerror}") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise InvalidError(f"'{directory}' is not this user's alone: chmod 0700 it, or use another")
    return path


class Channel:
    """One bound socket. One thread at a time uses it. `address` is for the engine.

    Waits call `stop` a few times a second, and raise an exception that it returns. The descriptor
    `woken` is readable when no further worker may come.
    """

    def __init__(self, address: str, *, stop: Callable[[], Exception | None] = lambda: None,
                 woken: int | None = None) -> None:
        path = self._path = socket_file(address)
        self.address = f"ipc://{path}"
        self._stop, self._woken = stop, woken
        self._context = zmq.Context()
        self._open()

    def _open(self) -> None:
        self.accepted = self._served = 0  # receivers
        self._connected = 0
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = _LINGER_MS
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidError(f"cannot listen at '{self._path}': {error.strerror}") from None

    def reopen(self) -> None:
        """Opens a new socket for the next worker after one has gone. What the old worker did not
        take is dropped. A worker that has connected meanwhile reconnects by itself.
        """
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._open()

    def wait_for_receiver(self, timeout: float, until: Callable[[], bool] | None = None) -> bool:
        """Waits until the next worker has connected. Returns False if `until()` is true before
        that; `woken` tells when to call it.

        TimeoutError: none came in `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        if self._woken is not None and until is not None:
            poller.register(self._woken, zmq.POLLIN)
        while True:
            self._take_events()
            if self.accepted > self._served:
                self._served += 1
                return True
            if until is not None and until():
                return False
            self._look(deadline, f"no receiver connected to {self.address}")
            poller.poll(_SLICE_MS)

    def tell(self, message: object, timeout: float) -> None:
        """Sends `message`, pickled. TimeoutError: the worker does not take it."""
        deadline = time.monotonic() + timeout
        frames = [b"", pickle.dumps(message)]
        # The message is for this worker, not for a later one at the same address.
        self._check_connected()
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._check_connected()
                self._look(deadline, f"the receiver at {self.address} takes no message")
                self._socket.poll(_SLICE_MS, zmq.POLLOUT)

    def answer(self, timeout: float) -> None:
        """Waits for the worker's answer.

        ReceiverError: it is an error. ReceiverLostError: the worker is gone. TimeoutError: no
        answer came in `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not self._socket.poll(0):
            # When the monitor reports that the worker is gone, its last answer is in the socket.
            self._take_events()
            if self._socket.poll(0):
                break
            self._check_connected()
            self._look(deadline, f"the receiver at {self.address} does not answer")
            poller.poll(_SLICE_MS)
        text = self._socket.recv_multipart()[-1]
        if text:
            raise _receiver_error(self.address, text.decode("utf-8", "replace"))

    def abort(self, reason: BaseException) -> None:
        """Tells a connected worker to give up, and waits at most 5 s until it is gone: before that
        it may still open or read the buffer. Never fails.
        """
        # Every receiver has the class of this exception.
        frames = [b"", pickle.dumps(RuntimeError(f"the sender failed: {reason}"))]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            deadline = time.monotonic() + _ABORT_GRACE
            while self._connected > 0 and time.monotonic() < deadline:
                self._monitor.poll(_SLICE_MS)
                self._take_events()

    def close(self) -> None:
        """Closes the socket. Takes at most 2 s, to send a last message."""
        if self._context.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _look(self, deadline: float, what: str) -> None:
        reason = self._stop()
        if reason is not None:
            raise reason
        if time.monotonic() >= deadline:
            raise TimeoutError(what)

    def _take_events(self) -> None:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.accepted += 1
                self._connected += 1
            else:
                self._connected -= 1

    def _check_connected(self) -> None:
        self._take_events()
        # The end of one connection may be seen only after the start of the next.
        deadline = time.monotonic() + _OVERLAP
        while self._connected > 1 and time.monotonic() < deadline:
            self._monitor.poll(_SLICE_MS)
            self._take_events()
        replaced = self._connected == 1 and self.accepted > self._served
        if self._connected < 1 or replaced:
            raise ReceiverLostError(f"the receiver at {self.address} is gone")
        if self._connected > 1:
            raise InvalidError(f"two receivers at {self.address}: each device needs its own socket")


def _receiver_error(address: str, text: str) -> ReceiverError:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ReceiverError(f"the receiver at {address} failed: {lines[-1] if lines else text}", text)
